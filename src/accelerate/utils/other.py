"""Old import path of what is nowhere else."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
