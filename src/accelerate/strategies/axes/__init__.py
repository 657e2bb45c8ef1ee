"""Layers of the dimensions of the device mesh."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
