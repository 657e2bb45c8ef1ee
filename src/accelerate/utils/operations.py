"""Old import path of nested structures and collectives."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
