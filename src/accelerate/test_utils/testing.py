"""Decorators that skip tests, base classes, assertions and launch commands for tests of client programs."""

from __future__ import annotations

import functools
import io
import shutil
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import torch

from accelerate import tracking
from accelerate.base import environ, is_torch_version, packages, parse_flag_from_env as parse_flag_from_env
from accelerate.commands import running
from accelerate.devices import CPU, detect, named
from accelerate.ops import gather
from accelerate.state import AcceleratorState, PartialState

SubprocessCallException = running.SubprocessCallException
execute_subprocess_async = running.execute_subprocess_async
path_in_accelerate_package = running.path_in_accelerate_package
run_command = running.run_command

Test = TypeVar("Test", bound=Callable[..., Any])
Mark = Callable[[Test], Test]

SLOW = "RUN_SLOW"
FIRST_PORT = 29500
FIRST_WORKER = "gw0"


# Marks


def _mark(name: str, condition: Callable[[], bool], reason: str) -> Mark[Any]:
    """Returns a decorator that skips a test, or a class of tests, if a condition is false.

    The condition is evaluated when the decorator is applied.
    """

    def mark(test_case: Test) -> Test:
        return unittest.skipUnless(condition(), reason)(test_case)

    mark.__name__ = mark.__qualname__ = name
    mark.__doc__ = f"Skips a test if its condition is false, for this reason: {reason}."
    return mark


def _require(name: str, condition: Callable[[], bool], reason: str) -> Mark[Any]:
    return _mark(f"require_{name}", condition, f"it {reason}")


def __getattr__(name: str) -> Mark[Any]:
    """Returns `require_x` of a package x, which skips a test if the package is not installed."""
    package = packages.PACKAGES.get(name.removeprefix("require_"))
    if package is None or not name.startswith("require_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _mark(name, package.available, f"it needs {package.distributions[0]}")


def _on(*names: str) -> Callable[[], bool]:
    return lambda: detect().name in names


def _not_on(*names: str) -> Callable[[], bool]:
    return lambda: detect().name not in names


def _count(least: int, most: int | None, *names: str) -> Callable[[], bool]:
    """Returns a condition for the number of devices of this node.

    Without names, it counts devices of any type except the CPU.
    """

    def condition() -> bool:
        backend = detect()
        if backend is CPU or (names and backend.name not in names):
            return False
        count = backend.count()
        return count >= least and (most is None or count <= most)

    return condition


def _has(*names: str) -> bool:
    return any(packages.PACKAGES[name].available() for name in names)


def _has_mxfp8() -> bool:
    if not _has("transformer_engine") or not named("cuda").available():
        return False
    return torch.cuda.get_device_capability() >= (10, 0)


require_cpu = _require("cpu", lambda: detect() is CPU, "runs on the CPU only")
require_non_cpu = _require("non_cpu", lambda: detect() is not CPU, "needs an accelerator")
require_cuda = _require("cuda", _on("cuda"), "needs an NVIDIA or AMD GPU")
require_xpu = _require("xpu", _on("xpu"), "needs an Intel GPU")
require_hpu = _require("hpu", _on("hpu"), "needs a Gaudi")
require_mlu = _require("mlu", _on("mlu"), "needs an MLU")
require_sdaa = _require("sdaa", _on("sdaa"), "needs an SDAA device")
require_musa = _require("musa", _on("musa"), "needs a MUSA GPU")
require_npu = _require("npu", _on("npu"), "needs an NPU")
require_neuron = _require("neuron", _on("neuron"), "needs Neuron cores")
require_mps = _require("mps", _on("mps"), "needs an Apple GPU")
require_tpu = _require("tpu", _on("xla"), "needs a TPU")
require_cuda_or_hpu = _require("cuda_or_hpu", _on("cuda", "hpu"), "needs a GPU or a Gaudi")
require_cuda_or_xpu = _require("cuda_or_xpu", _on("cuda", "xpu"), "needs a GPU")
require_non_xpu = _require("non_xpu", _not_on("xpu"), "does not run on Intel GPUs")
require_non_hpu = _require("non_hpu", _not_on("hpu"), "does not run on Gaudi")
require_non_torch_xla = _require("non_torch_xla", _not_on("xla"), "does not run on XLA devices")
require_multi_device = _require("multi_device", _count(2, None), "needs several accelerators")
require_single_device = _require("single_device", _count(1, 1), "needs a single accelerator")
require_multi_gpu = _require("multi_gpu", _count(2, None, "cuda"), "needs several GPUs")
require_single_gpu = _require("single_gpu", _count(1, 1, "cuda"), "needs a single GPU")
require_multi_xpu = _require("multi_xpu", _count(2, None, "xpu"), "needs several Intel GPUs")
require_single_xpu = _require("single_xpu", _count(1, 1, "xpu"), "needs a single Intel GPU")
require_multi_gpu_or_xpu = _require("multi_gpu_or_xpu", _count(2, None, "cuda", "xpu"), "needs several GPUs")
require_fp16 = _require(
    "fp16", lambda: detect().supports(torch.float16), "needs a device that computes in float16"
)
require_fp8 = _require(
    "fp8",
    lambda: _has("transformer_engine", "msamp", "torchao"),
    "needs transformer-engine, MS-AMP or torchao",
)
require_fsdp2 = _require("fsdp2", lambda: is_torch_version(">=", "2.6.0"), "needs torch 2.6")
require_tp = _require("tp", packages.is_transformers_available, "needs transformers")
require_pippy = _require("pippy", packages.is_pippy_available, "needs pipeline parallelism")
require_trackers = _require(
    "trackers",
    lambda: any(kind.available() for kind in tracking.TRACKERS) and not packages.is_comet_ml_available(),
    "needs a tracker, and comet_ml must not be there",
)
require_huggingface_suite = _require(
    "huggingface_suite", lambda: _has("transformers") and _has("datasets"), "needs transformers and datasets"
)
require_transformer_engine_mxfp8 = _require(
    "transformer_engine_mxfp8", _has_mxfp8, "needs transformer-engine on a GPU with MXFP8"
)
require_bnb = _require("bnb", packages.is_bnb_available, "needs bitsandbytes")
require_tensorboard = _require("tensorboard", packages.is_tensorboard_available, "needs tensorboard")
require_torchdata_stateful_dataloader = _require(
    "torchdata_stateful_dataloader",
    packages.is_torchdata_stateful_dataloader_available,
    "needs torchdata 0.8",
)
slow = _mark("slow", lambda: parse_flag_from_env(SLOW), f"it is slow; {SLOW}=1 runs it")
skip = _mark("skip", lambda: False, "it is left out")


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skips a test, or a class of tests, if torch is older than `version`.

    Without a test, it returns the decorator.
    """
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    new_enough = version is None or is_torch_version(">=", version)
    return unittest.skipUnless(new_enough, f"it needs torch {version}")(test_case)


def run_first(test_case: Test) -> Test:
    """Marks a test, or a class of tests, to run before the others, which needs pytest-order."""
    if not packages.is_pytest_available():
        return test_case
    import pytest

    marked: Test = pytest.mark.order(1)(test_case)
    return marked


# Hardware and commands


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Returns the device type of this node, the number of devices, and a function for their memory.

    The function returns the bytes that torch has allocated on the current device, and 0 on the CPU.
    """
    backend = detect()
    if backend is CPU:
        return backend.name, 1, lambda: 0
    allocated = getattr(backend.torch_module(), "memory_allocated", None)
    return backend.name, backend.count(), allocated or (lambda: 0)


torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: Any) -> list[str]:
    """Returns the command of `accelerate launch` with flags by name.

    True adds a flag without a value, and False and None add nothing.
    """
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def pytest_xdist_worker_id() -> int:
    """Returns the index of this worker of pytest-xdist, or 0 without workers."""
    return int(environ.current().get("PYTEST_XDIST_WORKER", FIRST_WORKER).removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Returns a port for `torch.distributed` that no other worker of pytest-xdist uses."""
    return FIRST_PORT + pytest_xdist_worker_id()


# Base classes and checks


class TempDirTestCase(unittest.TestCase):
    """Test case with a folder `tmpdir` for all tests of the class, which is removed after the last one."""

    clear_on_setup = True  # whether the folder is emptied before each test
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Creates the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Removes the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empties the folder."""
        if self.clear_on_setup:
            shutil.rmtree(self.tmpdir)
            self.tmpdir.mkdir()


class AccelerateTestCase(unittest.TestCase):
    """Test case that resets `AcceleratorState` and `PartialState` after each test."""

    def tearDown(self) -> None:
        """Resets the states."""
        super().tearDown()
        AcceleratorState._reset_state()
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Test case that replaces objects with mocks."""

    def add_mocks(self, mocks: Any) -> None:
        """Starts one or several patches of `unittest.mock.patch`, which are stopped when the test ends."""
        self.mocks = list(mocks) if isinstance(mocks, list | tuple) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` has the same values on all ranks.

    All ranks must call it.
    """
    values = gather(tensor[None].clone().to(PartialState().device)).cpu()
    return all(torch.equal(value, tensor.cpu()) for value in values)


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Raises an `AssertionError` unless the block raises an exception of this class with `msg` in it."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(f"{exception_class.__name__} was expected, and got {error!r}") from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"{msg!r} was expected in the text, and got {str(error)!r}") from error
    else:
        raise AssertionError(f"{exception_class.__name__} was expected, and nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns the text that a function prints when it is called with these arguments."""
    with redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()
