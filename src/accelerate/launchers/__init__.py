"""`notebook_launcher` and `debug_launcher`; the rest is part of this import path."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
