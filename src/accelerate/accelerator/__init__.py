"""Public class `Accelerator`, and names of its import path that clients replace.

`prepare_data_loader` and the other names of `__all__` are looked up here when they are used, so a client that
replaces one of them in this module takes effect. The rest is part of this import path.
"""

from accelerate.base import attach

__getattr__, __dir__, _ = attach(__name__)

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "fsdp2_prepare_model",
    "prepare_data_loader",
    "skip_first_batches",
]
