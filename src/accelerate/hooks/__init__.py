"""Code that runs around a module's forward."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
