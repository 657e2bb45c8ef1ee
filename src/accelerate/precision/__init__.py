"""Mixed precision of models, with autocast, gradient scaling and FP8 layers."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
