"""Building blocks without torch that all other packages import."""

from accelerate.base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
