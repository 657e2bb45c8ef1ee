"""`accelerate config` and what it writes and loads."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
