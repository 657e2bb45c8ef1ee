"""Predict the memory of training before it runs: a traced step, layouts over devices, and batch sizes."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
