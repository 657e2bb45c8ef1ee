"""Functions for parameters that are DTensors or units of FSDP, which several strategies use."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
