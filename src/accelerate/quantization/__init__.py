"""Models whose linear layers bitsandbytes computes in 8 or 4 bits."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
