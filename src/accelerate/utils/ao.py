"""Old import path of FP8 through torchao."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
