"""Megatron-LM's modules, imported when they are needed, and what is missing of them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

_FIXES = {
    "megatron.core": "Install it with `pip install megatron-core`",
    "megatron.training": (
        "Install megatron-core 0.17 or newer, which has it and wants Python 3.12, or clone "
        "https://github.com/NVIDIA/Megatron-LM and put the clone on PYTHONPATH"
    ),
}


def core(name: str) -> Any:
    """Return a module of `megatron.core`."""
    return import_module(f"megatron.core.{name}")


def training(name: str) -> Any:
    """Return a module of `megatron.training`."""
    return import_module(f"megatron.training.{name}")


def get_args() -> Any:
    """Return the arguments of the running Megatron-LM, a namespace."""
    return training("global_vars").get_args()


def is_running() -> bool:
    """Whether Megatron-LM has set up its groups in this process."""
    return bool(core("parallel_state").model_parallel_is_initialized())


def find_missing() -> list[str]:
    """Return what Megatron-LM lacks on this machine, one line each."""
    problems = [f"{name} cannot be imported. {fix}" for name, fix in _FIXES.items() if not exists(name)]
    if not torch.cuda.is_available():
        problems.append(
            "Megatron-LM computes on CUDA devices, and there is none. Run it on a machine with one"
        )
    return problems


def exists(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
