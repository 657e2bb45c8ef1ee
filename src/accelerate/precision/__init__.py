"""Number formats: which dtype a forward runs in, and what that asks of the backward pass."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
