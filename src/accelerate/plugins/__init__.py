"""Plugins and keyword-argument handlers that users pass to the constructor of `Accelerator`."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
