"""Hooks that run around the forward of modules."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
