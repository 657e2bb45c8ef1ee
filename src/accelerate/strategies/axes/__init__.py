"""Axes of the device mesh along which ranks work on the same batch."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
