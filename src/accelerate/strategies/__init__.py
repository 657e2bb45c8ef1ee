"""Strategies of training, which wrap objects and exchange gradients."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
