"""Local SGD and DiLoCo, in which processes train separately and exchange weights every few steps."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
