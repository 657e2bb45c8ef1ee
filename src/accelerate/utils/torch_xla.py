"""Old import path of the installation of torch_xla."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
