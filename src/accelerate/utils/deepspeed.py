"""Old import path of classes and functions for DeepSpeed."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
