"""Old import path of functions for environment variables, the GPU driver and CPU affinity."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
