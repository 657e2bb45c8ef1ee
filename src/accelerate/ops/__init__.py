"""Collectives over nested tensors and objects, and the transports that run them."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
