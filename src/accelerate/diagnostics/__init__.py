"""What helps when a run does not go as planned: hangs, out of memory, requests to stop, failed runs."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
