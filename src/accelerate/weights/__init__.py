"""Tensors of modules, files of weights, and offloaded weights."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
