"""Old import path of the probes of packages and hardware."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
