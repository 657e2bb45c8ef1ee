"""Old import path of functions of the launcher."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
