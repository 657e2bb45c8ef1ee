"""Experiment trackers, and names that the documented `accelerate.tracking` exports."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
