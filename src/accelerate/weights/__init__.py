"""Weights of modules: their files, and the names that share one tensor."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
