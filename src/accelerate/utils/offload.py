"""Old import path of weights that stay in files until they are needed."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
