"""Every option declared once; flags, file, environment, questions and docs are derived."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
