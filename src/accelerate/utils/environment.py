"""Old import path of what concerns environment variables, the driver and CPU affinity."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
