"""Old import path of what trains with DeepSpeed."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
