"""Vocabulary of the package: imports nothing of ours and no torch."""

from accelerate.base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
