"""How objects are prepared and stepped: one class for each strategy."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
