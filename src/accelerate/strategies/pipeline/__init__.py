"""Pipeline parallelism, in which ranks compute different layers of a model."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
