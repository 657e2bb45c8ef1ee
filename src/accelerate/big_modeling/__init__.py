"""Models larger than a device: plan, load, dispatch."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
