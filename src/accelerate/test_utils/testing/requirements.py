"""Marks for tests that need hardware or a package: each `require_x` is a row of condition and reason."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import tracking
from accelerate.base import is_torch_version, packages, parse_flag_from_env
from accelerate.devices import CPU, detect, named

Test = TypeVar("Test", bound=Callable[..., Any])
Mark = Callable[[Test], Test]

SLOW = "RUN_SLOW"


def _require(name: str, condition: Callable[[], bool], reason: str) -> Mark[Any]:
    """Build a mark that skips a test, or all tests of a class, where a condition does not hold.

    Args:
        name: What the mark is called.
        condition: Asked when the test is marked.
        reason: Why it is skipped.
    """

    def mark(test_case: Test) -> Test:
        return unittest.skipUnless(condition(), reason)(test_case)

    mark.__name__ = mark.__qualname__ = name
    mark.__doc__ = f"Skip a test unless its need is met; else: {reason}."
    return mark


def _on(*names: str) -> Callable[[], bool]:
    return lambda: detect().name in names


def _not_on(*names: str) -> Callable[[], bool]:
    return lambda: detect().name not in names


def _count(least: int, most: int | None, *names: str) -> Callable[[], bool]:
    """Whether this machine has so many devices, of one of these kinds (of any but the CPU without names)."""

    def condition() -> bool:
        backend = detect()
        if backend is CPU or (names and backend.name not in names):
            return False
        count = backend.count()
        return count >= least and (most is None or count <= most)

    return condition


def _any_tracker() -> bool:
    return any(tracker.available() for tracker in tracking.TRACKERS) and not packages.is_comet_ml_available()


def _supports(dtype: str) -> Callable[[], bool]:
    def condition() -> bool:
        import torch

        return detect().supports(getattr(torch, dtype))

    return condition


def _has_mxfp8() -> bool:
    if not packages.PACKAGES["transformer_engine"].available() or not named("cuda").available():
        return False
    import torch

    return torch.cuda.get_device_capability() >= (10, 0)


def _has(package: str) -> Callable[[], bool]:
    return lambda: packages.PACKAGES[package].available()


def _has_fp8() -> bool:
    return any(packages.PACKAGES[name].available() for name in ("transformer_engine", "msamp", "torchao"))


require_cpu = _require("require_cpu", lambda: detect() is CPU, "it runs on the CPU only")
require_non_cpu = _require("require_non_cpu", lambda: detect() is not CPU, "it needs an accelerator")
require_cuda = _require("require_cuda", _on("cuda"), "it needs an NVIDIA or AMD GPU")
require_xpu = _require("require_xpu", _on("xpu"), "it needs an Intel GPU")
require_hpu = _require("require_hpu", _on("hpu"), "it needs a Gaudi")
require_mlu = _require("require_mlu", _on("mlu"), "it needs an MLU")
require_sdaa = _require("require_sdaa", _on("sdaa"), "it needs an SDAA device")
require_musa = _require("require_musa", _on("musa"), "it needs a MUSA GPU")
require_npu = _require("require_npu", _on("npu"), "it needs an NPU")
require_neuron = _require("require_neuron", _on("neuron"), "it needs Neuron cores")
require_mps = _require("require_mps", _on("mps"), "it needs an Apple GPU")
require_tpu = _require("require_tpu", _on("xla"), "it needs a TPU")
require_cuda_or_hpu = _require("require_cuda_or_hpu", _on("cuda", "hpu"), "it needs a GPU or a Gaudi")
require_cuda_or_xpu = _require("require_cuda_or_xpu", _on("cuda", "xpu"), "it needs a GPU")
require_non_xpu = _require("require_non_xpu", _not_on("xpu"), "it does not run on Intel GPUs")
require_non_hpu = _require("require_non_hpu", _not_on("hpu"), "it does not run on Gaudi")
require_non_torch_xla = _require("require_non_torch_xla", _not_on("xla"), "it does not run on XLA devices")
require_multi_device = _require("require_multi_device", _count(2, None), "it needs several accelerators")
require_single_device = _require("require_single_device", _count(1, 1), "it needs a single accelerator")
require_multi_gpu = _require("require_multi_gpu", _count(2, None, "cuda"), "it needs several GPUs")
require_single_gpu = _require("require_single_gpu", _count(1, 1, "cuda"), "it needs a single GPU")
require_multi_xpu = _require("require_multi_xpu", _count(2, None, "xpu"), "it needs several Intel GPUs")
require_single_xpu = _require("require_single_xpu", _count(1, 1, "xpu"), "it needs a single Intel GPU")
require_multi_gpu_or_xpu = _require(
    "require_multi_gpu_or_xpu", _count(2, None, "cuda", "xpu"), "it needs several GPUs"
)
require_fp16 = _require("require_fp16", _supports("float16"), "it needs a device that computes in float16")
require_fp8 = _require("require_fp8", _has_fp8, "it needs transformer-engine, MS-AMP or torchao")
require_fsdp2 = _require("require_fsdp2", lambda: is_torch_version(">=", "2.6.0"), "it needs torch 2.6")
require_tp = _require(
    "require_tp",
    lambda: is_torch_version(">=", "2.3.0") and packages.is_transformers_available(),
    "it needs transformers",
)
require_pippy = _require("require_pippy", packages.is_pippy_available, "it needs pipeline parallelism")
require_trackers = _require(
    "require_trackers", _any_tracker, "it needs a tracker, and comet_ml must not be there"
)
require_huggingface_suite = _require(
    "require_huggingface_suite",
    lambda: packages.is_transformers_available() and packages.is_datasets_available(),
    "it needs transformers and datasets",
)
require_transformer_engine_mxfp8 = _require(
    "require_transformer_engine_mxfp8", _has_mxfp8, "it needs transformer-engine on a GPU with MXFP8"
)
require_bnb = _require("require_bnb", packages.is_bnb_available, "it needs bitsandbytes")
require_tensorboard = _require(
    "require_tensorboard", packages.is_tensorboard_available, "it needs tensorboard"
)
require_torchdata_stateful_dataloader = _require(
    "require_torchdata_stateful_dataloader",
    packages.is_torchdata_stateful_dataloader_available,
    "it needs torchdata 0.8",
)
require_aim = _require("require_aim", _has("aim"), "it needs aim")
require_clearml = _require("require_clearml", _has("clearml"), "it needs clearml")
require_comet_ml = _require("require_comet_ml", _has("comet_ml"), "it needs comet_ml")
require_datasets = _require("require_datasets", _has("datasets"), "it needs datasets")
require_deepspeed = _require("require_deepspeed", _has("deepspeed"), "it needs deepspeed")
require_dvclive = _require("require_dvclive", _has("dvclive"), "it needs dvclive")
require_import_timer = _require("require_import_timer", _has("import_timer"), "it needs import-timer")
require_matplotlib = _require("require_matplotlib", _has("matplotlib"), "it needs matplotlib")
require_mlflow = _require("require_mlflow", _has("mlflow"), "it needs mlflow")
require_pandas = _require("require_pandas", _has("pandas"), "it needs pandas")
require_peft = _require("require_peft", _has("peft"), "it needs peft")
require_schedulefree = _require("require_schedulefree", _has("schedulefree"), "it needs schedulefree")
require_swanlab = _require("require_swanlab", _has("swanlab"), "it needs swanlab")
require_timm = _require("require_timm", _has("timm"), "it needs timm")
require_torchao = _require("require_torchao", _has("torchao"), "it needs torchao")
require_torchvision = _require("require_torchvision", _has("torchvision"), "it needs torchvision")
require_trackio = _require("require_trackio", _has("trackio"), "it needs trackio")
require_transformer_engine = _require(
    "require_transformer_engine", _has("transformer_engine"), "it needs transformer-engine"
)
require_transformers = _require("require_transformers", _has("transformers"), "it needs transformers")
require_triton = _require("require_triton", _has("triton"), "it needs triton")
require_wandb = _require("require_wandb", _has("wandb"), "it needs wandb")
slow = _require("slow", lambda: parse_flag_from_env(SLOW), f"it is slow; {SLOW}=1 runs it")
skip = _require("skip", lambda: False, "it is left out")


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test where torch is older; without a test, a mark is returned.

    Args:
        test_case: The test, or a class of tests.
        version: The oldest version that works.
    """
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    new_enough = version is None or is_torch_version(">=", version)
    return unittest.skipUnless(new_enough, f"it needs torch {version}")(test_case)


def run_first(test_case: Test) -> Test:
    """Mark a test to run before the others; needs pytest-order, and has no effect without it.

    Args:
        test_case: The test, or a class of tests.
    """
    if not packages.is_pytest_available():
        return test_case
    import pytest

    marked: Test = pytest.mark.order(1)(test_case)
    return marked


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the torch device type of this machine, how many devices it has, and what says how much memory
    torch uses on the current one, in bytes (0 on the CPU)."""
    backend = detect()
    if backend is CPU:
        return backend.name, 1, lambda: 0
    used = getattr(backend.torch_module(), "memory_allocated", None)
    return backend.name, backend.count(), used or (lambda: 0)
