"""Old import path of what frees memory and retries with less of it."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
