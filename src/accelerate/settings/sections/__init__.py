"""Sections of settings by subject, which `settings.layers` lists."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
