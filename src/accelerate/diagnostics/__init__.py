"""Diagnostics of a run, such as hang reports, batch sizes that fit in memory and requests to stop."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
