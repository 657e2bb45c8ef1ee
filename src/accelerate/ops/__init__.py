"""Collectives over nested data: transports, gather, reduce, broadcast and padding."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
