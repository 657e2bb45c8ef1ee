"""Old import path of functions that free memory and retry with smaller batches."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
