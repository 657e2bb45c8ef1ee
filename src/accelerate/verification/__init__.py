"""Comparison of the training of a script in two launches, for `accelerate verify`."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
