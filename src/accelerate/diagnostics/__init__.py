"""What helps when a run does not go as planned: out-of-memory retries."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
