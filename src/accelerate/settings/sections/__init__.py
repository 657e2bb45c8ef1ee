"""Sections of settings, by subject; `settings.layers` lists all, a worker loads the files that it reads."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
