"""Old import path of quantization with bitsandbytes."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
