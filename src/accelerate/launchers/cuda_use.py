"""Who uses CUDA in this process, so that it cannot be forked any more."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import torch

from accelerate.base import are_libraries_initialized
from accelerate.nested import iterate_tensors

# Libraries that may start CUDA when they are imported.
_CUDA_STARTERS = ("bitsandbytes", "cupy", "jax", "pycuda.autoinit", "tensorflow")


def describe_cuda_use() -> str:
    """Say that CUDA is in use here, by whom as far as can be seen, and what to do."""
    holders = [f"the variable {name!r}" for name in _cuda_variables()]
    suspects = are_libraries_initialized(*_CUDA_STARTERS)
    if not holders and any(_on_cuda(thing) for thing in gc.get_objects()):
        holders = ["a tensor that some object holds"]
    known = f" It is used by {', '.join(holders)}." if holders else ""
    known += f" Importing {', '.join(suspects)} may have started it." if suspects else ""
    return (
        f"CUDA was already started in this process, and a process that uses it cannot be forked.{known} Move "
        "everything that touches the GPU (`.cuda()`, `.to('cuda')`, `torch.cuda.*`, imports that start CUDA) "
        "into the function, restart the notebook and launch again."
    )


def _cuda_variables() -> Iterator[str]:
    """Names of the notebook's own variables that hold something on a GPU."""
    for name, value in list(vars(sys.modules["__main__"]).items()):
        values = value.parameters() if isinstance(value, torch.nn.Module) else iterate_tensors(value)
        if not name.startswith("_") and any(_on_cuda(tensor) for tensor in values):
            yield name


def _on_cuda(thing: object) -> bool:
    return issubclass(type(thing), torch.Tensor) and bool(thing.is_cuda)  # type: ignore[attr-defined]
