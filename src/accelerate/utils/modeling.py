"""Old import path of functions for module sizes, device maps and loading of weights."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
