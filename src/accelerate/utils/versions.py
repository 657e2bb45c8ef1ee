"""Old import path of version comparison."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
