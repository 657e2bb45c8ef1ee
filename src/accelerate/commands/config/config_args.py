"""Import path of older scripts for the configuration classes of `accelerate.settings`."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
