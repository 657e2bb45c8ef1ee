"""The public class: `Accelerator`.

`prepare_data_loader` and the names below are looked up here when they are used, so a client that replaces one
of them in this module is heard.
"""

from accelerate.accelerator.core import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "prepare_data_loader",
    "skip_first_batches",
]
