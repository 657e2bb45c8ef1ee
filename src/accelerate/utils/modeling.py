"""Old import path of what measures, places and loads modules."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
