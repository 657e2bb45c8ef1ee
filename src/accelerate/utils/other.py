"""Old import path of the remaining functions."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
