"""Training that continues when processes end, with replica groups that torchft joins."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
