"""Old import path of functions for random number generators."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
