"""Prediction of the memory of training, for `plan_memory` and `accelerate estimate-memory`."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
