"""Old import path of the checks for installed packages and hardware."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
