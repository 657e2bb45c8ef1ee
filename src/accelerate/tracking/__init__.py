"""Experiment trackers: the public names, and those that `accelerate.tracking` has always offered."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
