"""Old import path of collectives and functions for nested structures of tensors."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
