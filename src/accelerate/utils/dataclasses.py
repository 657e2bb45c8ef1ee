"""Old import path of the enumerations and plugins."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
