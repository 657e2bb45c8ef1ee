"""Old import path of the comparison of versions."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
