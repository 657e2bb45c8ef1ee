"""Launchers for notebooks and tests, `notebook_launcher` and `debug_launcher`."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
