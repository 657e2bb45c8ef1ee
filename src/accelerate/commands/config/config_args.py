"""Old import path of the configuration classes of `accelerate.settings`."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
