"""Collectives over nested data: the wire, and what is gathered, reduced, broadcast and padded over it."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
