"""Table of hardware backends with lookup functions and public probes such as `is_xpu_available`."""

import gc
import platform
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.base import (
    DistributedType,
    RNGType,
    current,
    installed_version,
    is_msamp_available,
    is_torch_version,
    is_torchao_available,
    is_transformer_engine_available,
    wrong_value,
)
from accelerate.devices import nvidia
from accelerate.devices.backend import CpuBackend, DeviceBackend, GaudiBackend, GenericBackend, MpsBackend
from accelerate.devices.xla import XlaBackend, count_chips, xla_wanted

if TYPE_CHECKING:
    import torch

    USE_TORCH_XLA: bool

Backend = TypeVar("Backend", bound=DeviceBackend)


def _row(backend: type[Backend], name: str, label: str, **columns: Any) -> Backend:
    """Returns a backend whose distributed type, torch module and generator are named after the device."""
    upper = name.upper()
    kind, generator = DistributedType[f"MULTI_{upper}"], RNGType[upper]
    return backend(name, label, kind, f"torch.{name}", rng_type=generator, **columns)


def _extension(name: str, label: str, comm: str, visible_env: str, **columns: Any) -> DeviceBackend:
    """Returns a backend that the package `torch_NAME` adds to torch with its own gradient scaler."""
    columns |= {"comm": comm, "visible_env": visible_env, "extension": f"torch_{name}", "own_scaler": True}
    return _row(DeviceBackend, name, label, **columns)


CUDA = DeviceBackend(
    name="cuda",
    label="GPU (NVIDIA or AMD)",
    distributed_type=DistributedType.MULTI_GPU,
    comm="gloo" if sys.platform == "win32" else "nccl",  # NCCL does not support Windows
    visible_env="CUDA_VISIBLE_DEVICES",
    module="torch.cuda",
    rng_type=RNGType.CUDA,
    probe_variables=(("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),),
    binds_group=sys.platform != "win32",
    has_float64=True,
    has_streams=True,
    checks_fork=True,
)
XPU = _row(
    DeviceBackend,
    "xpu",
    "Intel XPU",
    comm="xccl",
    visible_env="ZE_AFFINITY_MASK",
    has_float64=True,
    has_streams=True,
)
NPU = _extension("npu", "Ascend NPU", "hccl", "ASCEND_RT_VISIBLE_DEVICES")
MLU = _extension(
    "mlu",
    "Cambricon MLU",
    "cncl",
    "MLU_VISIBLE_DEVICES",
    probe_variables=(("PYTORCH_CNDEV_BASED_MLU_CHECK", "1"),),
)
SDAA = _extension("sdaa", "Tecorigin SDAA", "tccl", "SDAA_VISIBLE_DEVICES")
MUSA = _extension("musa", "Moore Threads MUSA", "mccl", "MUSA_VISIBLE_DEVICES")
HPU = _row(
    GaudiBackend,
    "hpu",
    "Intel Gaudi HPU",
    comm="hccl",
    visible_env="HABANA_VISIBLE_MODULES",
    extension="habana_frameworks.torch",
    deepspeed_variables=(("DEEPSPEED_USE_HPU", "true"),),
)
NEURON = _row(
    DeviceBackend,
    "neuron",
    "AWS Neuron",
    comm="neuron",
    visible_env="NEURON_RT_VISIBLE_CORES",
    extension="torch_neuronx",
    is_addressable=False,
)
MPS = MpsBackend(
    name="mps",
    label="Apple GPU (MPS)",
    distributed_type=DistributedType.NO,
    module="torch.mps",
    lacks=frozenset({"float64", "complex128"}),
    shares_host_memory=True,
    notebook_variables=(("PYTORCH_ENABLE_MPS_FALLBACK", "1"),),
)
XLA = XlaBackend(
    name="xla",
    label="TPU (XLA)",
    distributed_type=DistributedType.XLA,
    comm="xla",
    module="torch_xla.core.xla_model",
    rng_type=RNGType.XLA,
    extension="torch_xla",
    own_runtime=True,
    is_addressable=False,
)
CPU = CpuBackend(
    name="cpu",
    label="CPU",
    distributed_type=DistributedType.MULTI_CPU,
    comm="gloo",
    module="torch.cpu",
    rng_type=RNGType.TORCH,
    largest_index=127,
    deepspeed_variables=(("DS_ACCELERATOR", "cpu"),),
    is_host=True,
    shares_host_memory=True,
    has_float64=True,
)

# In the order in which they are probed. The CPU is always available.
BACKENDS: tuple[DeviceBackend, ...] = (CUDA, XPU, NPU, MLU, SDAA, MUSA, HPU, NEURON, MPS, XLA, CPU)

_BY_NAME = {backend.name: backend for backend in BACKENDS}

_OTHER = DeviceBackend("", "other device", DistributedType.NO, module="torch")
"""Backend of device types that do not compute, such as "meta"."""


@cache
def detect() -> DeviceBackend:
    """Returns the backend of the hardware of this process, the first available row of the table.

    A device that is not in the table, and that another package registers with torch, takes precedence over
    the CPU. The result is cached, and `detect.cache_clear()` clears it.
    """
    first_available = next(backend for backend in BACKENDS if backend.available())
    return first_available if not first_available.is_host else _registered() or first_available


def _registered() -> DeviceBackend | None:
    """Returns the backend of an available device that another package has registered with torch, or None."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type in _BY_NAME else _generic(accelerator.type)


@cache
def _generic(name: str) -> GenericBackend:
    import torch.distributed as dist

    groups = dist.Backend.default_device_backend_map if dist.is_available() else {}
    kind = DistributedType.MULTI_GPU  # what scripts compare with for data-parallel training on accelerators
    comm = groups.get(name)
    return GenericBackend(name, f"{name} device", kind, f"torch.{name}", comm=comm, has_streams=True)


def named(name: str, asked_by: str = "device") -> DeviceBackend:
    """Returns the backend of a torch device type without an index.

    `asked_by` is the option that the error names.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    registered = _registered()
    if registered is None or registered.name != name:
        raise wrong_value(asked_by, name, "no such kind of device", f"use one of {', '.join(_BY_NAME)}")
    return registered


def of_device(device: "torch.device") -> DeviceBackend:
    """Returns the backend of a device, or an empty one for types that do not compute."""
    backend = _BY_NAME.get(device.type)
    return _of_other(device.type) if backend is None else backend


@cache
def _of_other(name: str) -> DeviceBackend:
    registered = None if name == "meta" else _registered()
    return registered if registered is not None and registered.name == name else _OTHER


def get_current_device_type() -> tuple[str, str]:
    """Returns the device type and the type of data-parallel training, without starting a device.

    Returns:
        A pair such as `("cuda", "MULTI_GPU")` or `("cpu", "MULTI_CPU")`.
    """
    backend = detect()
    return backend.name, backend.distributed_type.value


def count_visible(environ: Mapping[str, str] | None = None) -> tuple[DeviceBackend, int]:
    """Returns the backend and the number of devices that a launched process with these variables would use.

    It imports torch only where necessary.
    """
    environ = current() if environ is None else environ
    build = (installed_version("torch").local or "").partition(".")[0]
    if any(backend.extension and backend.installed() for backend in BACKENDS):
        return _ask_torch()
    if platform.system() == "Darwin":
        return (MPS, 1) if platform.machine() == "arm64" else (CPU, 1)
    if build.startswith(("rocm", "xpu")):
        return _ask_torch()
    count = 0 if build == "cpu" or not nvidia.driver_present() else len(nvidia.visible_indices(environ))
    if count:
        return CUDA, count
    from importlib.metadata import entry_points  # slow to import, and needed only without other devices

    # An installed package may register a device when torch is imported.
    return _ask_torch() if entry_points(group="torch.backends") else (CPU, 1)


def _ask_torch() -> tuple[DeviceBackend, int]:
    backend = detect()
    if backend is XLA:  # its runtime would lock the chips for this process
        return XLA, max(1, count_chips())
    return backend, backend.count()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Releases cached device memory that torch does not use.

    Args:
        garbage_collection: Collect unreachable Python objects first, to release their memory, too.
    """
    if garbage_collection:
        gc.collect()
    detect().empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Drops references to objects and releases their memory, as in `a, b = release_memory(a, b)`.

    Args:
        *objects: Objects to release. Their memory is free once the variables of the caller are reassigned.

    Returns:
        A None for each object, to assign to the same names.
    """
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def _probe(backend: DeviceBackend) -> Callable[..., bool]:
    """Returns the public probe `is_NAME_available` of one row, with a cached result."""

    def probe(check_device: bool = False) -> bool:
        # Counting the devices starts the driver.
        return backend.available() and (not check_device or backend.count() > 0)

    probe.__name__ = probe.__qualname__ = f"is_{backend.name}_available"
    probe.__doc__ = f"Returns whether {backend.label} devices can be used; `check_device` counts them."
    return cache(probe)


def is_torch_distributed_available() -> bool:
    """Returns whether this torch was built with `torch.distributed`."""
    import torch.distributed

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Returns whether this torch was built with the XCCL process group backend for Intel XPUs."""
    import torch.distributed

    ask = getattr(torch.distributed, "is_xccl_available", None)
    return is_torch_distributed_available() and ask is not None and bool(ask())


def is_rocm_available() -> bool:
    """Returns whether AMD GPUs can be used."""
    import torch

    return torch.version.hip is not None and CUDA.available()


def is_cuda_available() -> bool:
    """Returns whether a GPU can be used, without starting CUDA, so that the process can still be forked."""
    return CUDA.available()


@cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Returns whether torch_xla is installed and not disabled by `USE_TORCH_XLA=false`.

    Args:
        check_is_tpu: Also check that it drives a TPU, which starts the device.
        check_is_gpu: Also check that it drives a GPU, which starts the device.

    Raises:
        ConfigurationError: If both are true.
    """
    if check_is_tpu and check_is_gpu:
        raise wrong_value(
            "check_is_gpu", True, "check_is_tpu is true too, and XLA drives one", "ask for one of them"
        )
    if not XLA.available():
        return False
    if check_is_tpu:
        return XLA.hardware() == "TPU"
    return not check_is_gpu or XLA.hardware() in ("GPU", "CUDA")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Returns whether the hardware of this process computes in bfloat16.

    Args:
        ignore_tpu: Return False on TPUs.
    """
    import torch

    backend = detect()
    return not (ignore_tpu and backend == XLA) and backend.supports(torch.bfloat16)


def is_fp16_available() -> bool:
    """Returns whether the hardware of this process computes in float16."""
    import torch

    return detect().supports(torch.float16)


def is_fp8_available() -> bool:
    """Returns whether torchao, Transformer Engine or MS-AMP, which compute in FP8, is installed."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


@cache
def is_mps_available(min_version: str = "1.12") -> bool:
    """Returns whether an Apple GPU can be used with a minimum version of torch."""
    return is_torch_version(">=", min_version) and MPS.available()


is_mlu_available = _probe(MLU)
is_musa_available = _probe(MUSA)
is_neuron_available = _probe(NEURON)
is_npu_available = _probe(NPU)
is_sdaa_available = _probe(SDAA)
is_xpu_available = _probe(XPU)


@cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Returns whether Intel Gaudi devices can be used.

    `init_hccl` also registers their process group backend with torch.
    """
    if not HPU.available():
        return False
    if init_hccl:
        import_module("habana_frameworks.torch.distributed.hccl")
    return True


@cache
def is_habana_gaudi1() -> bool:
    """Returns whether the devices are first-generation Gaudi."""
    return HPU.available() and HPU.is_first_generation()


@cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Returns whether Transformer Engine is installed and the GPU, which is started, computes in MXFP8."""
    if not (is_transformer_engine_available() and CUDA.available()):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def __getattr__(name: str) -> Any:
    # The environment is read on access, not when this file is imported.
    if name == "USE_TORCH_XLA":
        return xla_wanted()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
