"""Devices behind torch_xla: TPUs, and others for trying it out."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
