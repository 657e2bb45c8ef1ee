"""Training with Megatron-LM.

Source: https://github.com/NVIDIA/Megatron-LM (`megatron.core` and `megatron.training`)
"""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
