"""From settings to running processes: resolve a plan, render it, run it. Imports no torch."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
