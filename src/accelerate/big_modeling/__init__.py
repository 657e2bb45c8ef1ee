"""Planning, loading and dispatching of models that are larger than a device."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
