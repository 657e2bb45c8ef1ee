"""Public class `Accelerator`, and names of its import path that clients replace.

`prepare_data_loader`, `fsdp2_prepare_model` and `convert_model_to_fp8_ao` are looked up here when they are
used, so a replacement by a client library has an effect. The other names are part of this import path.
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
