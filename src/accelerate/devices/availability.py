"""Public probes of hardware and of what it can do: each a line over the table of hardware or of packages."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accelerate.base import PACKAGES, is_msamp_available, is_torch_version, is_torchao_available, wrong_value
from accelerate.devices.backend import DeviceBackend
from accelerate.devices.hardware_table import CUDA, HPU, MLU, MPS, MUSA, NEURON, NPU, SDAA, XLA, XPU, detect
from accelerate.devices.xla import xla_wanted

if TYPE_CHECKING:
    USE_TORCH_XLA: bool


def _probe(backend: DeviceBackend) -> Callable[..., bool]:
    """Return the public probe of one row: whether torch can use such devices, asked once."""

    def probe(check_device: bool = False) -> bool:
        # With check_device the devices are counted, which starts the driver.
        return backend.available() and (not check_device or backend.count() > 0)

    probe.__name__ = probe.__qualname__ = f"is_{backend.name}_available"
    probe.__doc__ = f"Return whether {backend.label} devices can be used; `check_device` counts them."
    return cache(probe)


def is_torch_distributed_available() -> bool:
    """Return whether this torch was built with `torch.distributed`."""
    import torch.distributed

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Return whether this torch was built with the XCCL process group, for Intel XPUs."""
    import torch.distributed

    ask = getattr(torch.distributed, "is_xccl_available", None)
    return is_torch_distributed_available() and ask is not None and bool(ask())


def is_rocm_available() -> bool:
    """Return whether the GPUs are AMD's."""
    import torch

    return torch.version.hip is not None and CUDA.available()


def is_cuda_available() -> bool:
    """Return whether a GPU can be used, without starting CUDA: the process can still be forked."""
    return CUDA.available()


@cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and not turned off by `USE_TORCH_XLA=false`.

    Args:
        check_is_tpu: Ask also whether it drives a TPU; starts the device.
        check_is_gpu: Ask also whether it drives a GPU; starts the device.

    Raises:
        ConfigurationError: If both questions are asked.
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
    """Return whether the hardware in use computes in bfloat16.

    Args:
        ignore_tpu: Say no on TPUs.
    """
    import torch

    backend = detect()
    return not (ignore_tpu and backend == XLA) and backend.supports(torch.bfloat16)


def is_fp16_available() -> bool:
    """Return whether the hardware in use computes in float16; the first Gaudi does not."""
    import torch

    return detect().supports(torch.float16)


def is_fp8_available() -> bool:
    """Return whether a library that computes in FP8 is installed: torchao, Transformer Engine or MS-AMP."""
    return is_torchao_available() or is_transformer_engine_available() or is_msamp_available()


@cache
def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether Apple's GPU can be used, with at least this torch."""
    return is_torch_version(">=", min_version) and MPS.available()


is_mlu_available = _probe(MLU)
is_musa_available = _probe(MUSA)
is_neuron_available = _probe(NEURON)
is_npu_available = _probe(NPU)
is_sdaa_available = _probe(SDAA)
is_xpu_available = _probe(XPU)


@cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether Intel Gaudi devices can be used; with `init_hccl` torch learns their process group."""
    if not HPU.available():
        return False
    if init_hccl:
        import_module("habana_frameworks.torch.distributed.hccl")
    return True


@cache
def is_habana_gaudi1() -> bool:
    """Return whether the devices are first-generation Gaudi."""
    return HPU.available() and HPU.is_first_generation()


def is_transformer_engine_available() -> bool:
    """Return whether Transformer Engine is installed."""
    return PACKAGES["transformer_engine"].available()


@cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether Transformer Engine is installed and the GPU computes in MXFP8; starts CUDA."""
    if not (is_transformer_engine_available() and CUDA.available()):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_triton_available() -> bool:
    """Return whether Triton is installed."""
    return PACKAGES["triton"].available()


def __getattr__(name: str) -> Any:
    # The environment is read when somebody asks, not when this file is imported.
    if name == "USE_TORCH_XLA":
        return xla_wanted()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
