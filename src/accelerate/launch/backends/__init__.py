"""Launchers, each of which runs a plan."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
