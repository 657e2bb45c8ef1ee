"""Resolution of settings into a launch plan, and launchers that run it without importing torch."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
