"""Old import path of functions for FP8 training with Transformer Engine."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
