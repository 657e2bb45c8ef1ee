"""Tools for tests of programs that use this package, and the scripts that `accelerate test` launches."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
