"""The one ordered table of backends, and look-up in it: the only place that chooses hardware."""

import gc
import platform
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from accelerate.base import DistributedType, RNGType, current, installed_version, wrong_value
from accelerate.devices import nvidia
from accelerate.devices.backend import CpuBackend, DeviceBackend, GaudiBackend, MpsBackend
from accelerate.devices.xla import XlaBackend, count_chips

if TYPE_CHECKING:
    import torch

CUDA = DeviceBackend(
    name="cuda",
    label="GPU (NVIDIA or AMD)",
    distributed_type=DistributedType.MULTI_GPU,
    comm="nccl",
    visible_env="CUDA_VISIBLE_DEVICES",
    module="torch.cuda",
    rng_type=RNGType.CUDA,
    probe_variables=(("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),),
    binds_group=True,
    has_float64=True,
    has_streams=True,
    checks_fork=True,
)
XPU = DeviceBackend(
    name="xpu",
    label="Intel XPU",
    distributed_type=DistributedType.MULTI_XPU,
    comm="xccl",
    visible_env="ZE_AFFINITY_MASK",
    module="torch.xpu",
    rng_type=RNGType.XPU,
    has_float64=True,
    has_streams=True,
)
NPU = DeviceBackend(
    name="npu",
    label="Ascend NPU",
    distributed_type=DistributedType.MULTI_NPU,
    comm="hccl",
    visible_env="ASCEND_RT_VISIBLE_DEVICES",
    module="torch.npu",
    rng_type=RNGType.NPU,
    extension="torch_npu",
    own_scaler=True,
)
MLU = DeviceBackend(
    name="mlu",
    label="Cambricon MLU",
    distributed_type=DistributedType.MULTI_MLU,
    comm="cncl",
    visible_env="MLU_VISIBLE_DEVICES",
    module="torch.mlu",
    rng_type=RNGType.MLU,
    extension="torch_mlu",
    own_scaler=True,
    probe_variables=(("PYTORCH_CNDEV_BASED_MLU_CHECK", "1"),),
)
SDAA = DeviceBackend(
    name="sdaa",
    label="Tecorigin SDAA",
    distributed_type=DistributedType.MULTI_SDAA,
    comm="tccl",
    visible_env="SDAA_VISIBLE_DEVICES",
    module="torch.sdaa",
    rng_type=RNGType.SDAA,
    extension="torch_sdaa",
    own_scaler=True,
)
MUSA = DeviceBackend(
    name="musa",
    label="Moore Threads MUSA",
    distributed_type=DistributedType.MULTI_MUSA,
    comm="mccl",
    visible_env="MUSA_VISIBLE_DEVICES",
    module="torch.musa",
    rng_type=RNGType.MUSA,
    extension="torch_musa",
    own_scaler=True,
)
HPU = GaudiBackend(
    name="hpu",
    label="Intel Gaudi HPU",
    distributed_type=DistributedType.MULTI_HPU,
    comm="hccl",
    visible_env="HABANA_VISIBLE_MODULES",
    module="torch.hpu",
    rng_type=RNGType.HPU,
    extension="habana_frameworks.torch",
    deepspeed_variables=(("DEEPSPEED_USE_HPU", "true"),),
)
NEURON = DeviceBackend(
    name="neuron",
    label="AWS Neuron",
    distributed_type=DistributedType.MULTI_NEURON,
    comm="neuron",
    visible_env="NEURON_RT_VISIBLE_CORES",
    module="torch.neuron",
    rng_type=RNGType.NEURON,
    extension="torch_neuronx",
    is_addressable=False,
)
MPS = MpsBackend(
    name="mps",
    label="Apple GPU (MPS)",
    distributed_type=DistributedType.NO,
    comm=None,
    visible_env=None,
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
    visible_env=None,
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
    visible_env=None,
    module="torch.cpu",
    rng_type=RNGType.TORCH,
    largest_index=127,
    deepspeed_variables=(("DS_ACCELERATOR", "cpu"),),
    is_host=True,
    shares_host_memory=True,
    has_float64=True,
)

# In the order in which they are asked; the CPU always answers.
BACKENDS: tuple[DeviceBackend, ...] = (CUDA, XPU, NPU, MLU, SDAA, MUSA, HPU, NEURON, MPS, XLA, CPU)

_BY_NAME = {backend.name: backend for backend in BACKENDS}

_OTHER = DeviceBackend("", "other device", DistributedType.NO, comm=None, visible_env=None, module="torch")
"""Kinds that are not in the table: "meta", and those that other packages bring to torch."""


@cache
def detect() -> DeviceBackend:
    """Return the backend of the hardware this process uses: the first of the table that is available.

    The answer is kept; `detect.cache_clear()` asks again.
    """
    return next(backend for backend in BACKENDS if backend.available())


def named(name: str, asked_by: str = "device") -> DeviceBackend:
    """Return the backend of a torch device type.

    Args:
        name: of the type, without a number.
        asked_by: what the user set, for the message.

    Raises:
        ConfigurationError: If the table has no such row.
    """
    if name not in _BY_NAME:
        raise wrong_value(asked_by, name, "no such kind of device", f"use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def of_device(device: "torch.device") -> DeviceBackend:
    """Return the backend of a device; a plain row for a kind that is not in the table.

    Args:
        device: of any kind.
    """
    return _BY_NAME.get(device.type, _OTHER)


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of hardware and the label of data-parallel training on it, without starting a device.

    Returns:
        A pair such as `("cuda", "MULTI_GPU")` or `("cpu", "MULTI_CPU")`.
    """
    backend = detect()
    return backend.name, backend.distributed_type.value


def count_visible(environ: Mapping[str, str] | None = None) -> tuple[DeviceBackend, int]:
    """Return the hardware a launched process would find and how many; imports torch only where it must.

    Args:
        environ: The variables the process would see; default: those of this process.
    """
    environ = current() if environ is None else environ
    build = (installed_version("torch").local or "").partition(".")[0]
    if any(backend.extension and backend.installed() for backend in BACKENDS):
        return _ask_torch()
    if platform.system() == "Darwin":
        return (MPS, 1) if platform.machine() == "arm64" else (CPU, 1)
    if build.startswith(("rocm", "xpu")):
        return _ask_torch()
    if build == "cpu" or not nvidia.driver_present():
        return CPU, 1
    count = nvidia.count_visible(environ)
    return (CUDA, count) if count else (CPU, 1)


def _ask_torch() -> tuple[DeviceBackend, int]:
    backend = detect()
    if backend is XLA:  # asking its runtime would take the chips from the processes that are to use them
        return XLA, max(1, count_chips())
    return backend, backend.count()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that torch holds but does not use back to the device.

    Args:
        garbage_collection: Collect unreachable Python objects first, so that their memory is among it.
    """
    if garbage_collection:
        gc.collect()
    detect().empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Drop references and free what they held: `model, optimizer = release_memory(model, optimizer)`.

    Args:
        *objects: What is no longer needed. The memory is free once the caller's own names are rebound too.

    Returns:
        A None for each object, to assign to the same names.
    """
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released
