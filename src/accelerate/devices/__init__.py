"""Table of hardware backends and functions to query it, which import torch only when called."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
