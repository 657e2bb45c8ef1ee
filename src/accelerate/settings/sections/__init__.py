"""One file for each subject; `settings.layers` lists all, a worker loads only what it reads."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
