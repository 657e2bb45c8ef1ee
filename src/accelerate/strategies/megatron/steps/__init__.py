"""Train steps: how each family of models turns a batch into a loss."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
