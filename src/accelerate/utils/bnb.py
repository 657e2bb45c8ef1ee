"""Old import path of quantization by bitsandbytes."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
