"""Backend for TPUs and other devices behind torch_xla, and all calls of torch_xla."""

import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.base import StateError, current, installed_version, parse_flag_from_env
from accelerate.devices.backend import DeviceBackend

if TYPE_CHECKING:
    import torch

DEVICES = Path("/dev")
WHEEL_PAGE = "https://storage.googleapis.com/libtpu-releases/index.html"


def count_chips(devices: Path = DEVICES) -> int:
    """Returns the number of TPU chips of this machine without starting the runtime, which would lock them."""
    return len([*devices.glob("accel[0-9]*")] or [*devices.glob("vfio/[0-9]*")])


def xla_wanted() -> bool:
    """Returns whether XLA is used where it is installed (`USE_TORCH_XLA`, default yes)."""
    return parse_flag_from_env("USE_TORCH_XLA", default=True)


def mark_step() -> None:
    """Starts the execution of the operations recorded so far."""
    package = import_module("torch_xla")
    if hasattr(package, "sync"):
        package.sync()
    else:  # older versions
        import_module("torch_xla.core.xla_model").mark_step()


row_axes = "fsdp"
"""Mesh axis along which batches and parameters are sharded."""


def use_mesh() -> Any:
    """Enables SPMD, in which this process drives all devices of its machine, and returns their 1D mesh.

    Called before tensors are created on the device.
    """
    import numpy as np

    runtime, spmd = import_module("torch_xla.runtime"), import_module("torch_xla.distributed.spmd")
    if not runtime.is_spmd():
        runtime.use_spmd()
    if spmd.get_global_mesh() is None:
        size = runtime.global_runtime_device_count()
        spmd.set_global_mesh(spmd.Mesh(np.arange(size), (size, 1), (row_axes, "model")))
    return spmd.get_global_mesh()


def is_shared() -> bool:
    """Returns whether SPMD is enabled, in which this process drives all devices of its machine."""
    return bool(import_module("torch_xla.runtime").is_spmd())


def share_rows(tensor: "torch.Tensor", mesh: object) -> None:
    """Shards the rows of a tensor on the XLA device over a mesh, if they divide evenly."""
    if is_divisible(tensor, mesh):
        spec = (row_axes, *(None,) * (tensor.ndim - 1))
        import_module("torch_xla.distributed.spmd").mark_sharding(tensor, mesh, spec)


def is_divisible(tensor: "torch.Tensor", mesh: Any) -> bool:
    """Returns whether the rows of a tensor divide evenly over a mesh."""
    return tensor.ndim > 0 and tensor.shape[0] % mesh.size() == 0


class RowSharding:
    """Sharding of input batches by rows, for the loader of torch_xla under SPMD.

    The class of torch_xla describes tensors of one number of dimensions only.
    """

    minibatch = False

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._specs: dict[int, Any] = {}

    def xla_spec(self, t: "torch.Tensor") -> Any:
        """Returns the sharding spec of one tensor, or None to replicate it."""
        if not is_divisible(t, self.mesh):
            return None
        if t.ndim not in self._specs:
            spec = (row_axes, *(None,) * (t.ndim - 1))
            self._specs[t.ndim] = import_module("torch_xla.distributed.spmd").ShardingSpec(self.mesh, spec)
        return self._specs[t.ndim].xla_spec(t)


def upload_options() -> dict[str, Any]:
    """Returns the options of the torch_xla loader, which shard batches by rows under SPMD."""
    mesh = import_module("torch_xla.distributed.spmd").get_global_mesh() if is_shared() else None
    return {} if mesh is None else {"input_sharding": RowSharding(mesh)}


@dataclass(frozen=True)
class XlaBackend(DeviceBackend):
    """Backend for TPUs and other devices behind torch_xla."""

    def available(self) -> bool:
        return xla_wanted() and self.installed()

    def torch_module(self) -> Any:
        return import_module(self.module)

    def hardware(self) -> str:
        """Returns the type of the hardware, such as `TPU`, `GPU`, `CUDA` or `CPU`."""
        return str(self.torch_module().xla_device_hw(self.device()))

    def count(self) -> int:
        return int(import_module("torch_xla.runtime").addressable_device_count())

    def device(self, index: int | None = None) -> "torch.device":
        package = import_module("torch_xla")
        if hasattr(package, "device"):
            return package.device(index)  # type: ignore[no-any-return]
        return self.torch_module().xla_device(index)  # type: ignore[no-any-return]  # older versions

    def set_current(self, index: int) -> None:
        """Does nothing because the runtime assigns a device to each process."""

    def current(self) -> int:
        return int(import_module("torch_xla.runtime").local_ordinal())

    def synchronize(self) -> None:
        self.torch_module().wait_device_ops()

    def _memory(self, index: int) -> tuple[int, int]:
        info = self.torch_module().get_memory_info(self.device(index))
        return int(info["bytes_limit"]) - int(info["bytes_used"]), int(info["bytes_limit"])

    def empty_cache(self) -> None:
        """Does nothing because the runtime manages the memory."""

    def seed(self, n: int) -> None:
        self.torch_module().set_rng_state(n)

    def rng_state(self) -> "torch.Tensor":
        import torch

        state = int(self.torch_module().get_rng_state())  # unsigned, while tensors hold signed integers
        return torch.tensor(state - 2**64 if state >= 2**63 else state)

    def set_rng_state(self, s: "torch.Tensor") -> None:
        self.torch_module().set_rng_state(int(s) % 2**64)

    def supports(self, dtype: "torch.dtype") -> bool:
        return str(dtype) != "torch.float16" or self.hardware() in ("GPU", "CUDA")

    def grad_scaler(self, **kw: Any) -> "torch.amp.GradScaler":
        return import_module("torch_xla.amp").GradScaler(**kw)  # type: ignore[no-any-return]


def install_xla(upgrade: bool = False) -> None:
    """Installs the torch_xla version that matches the installed torch in a Google Colab notebook.

    Args:
        upgrade: Also upgrade an installed torch_xla to that version.

    Raises:
        StateError: If this is not Google Colab.
        subprocess.CalledProcessError: If pip fails, which prints its output.
    """
    if "google.colab" not in sys.modules and "COLAB_RELEASE_TAG" not in current():
        raise StateError(
            "`install_xla` works in Google Colab only, and this is not a Colab notebook. "
            "Outside of Colab, install torch_xla as its documentation says."
        )
    release = ".".join(map(str, installed_version("torch").release))
    command = [sys.executable, "-m", "pip", "install", f"torch_xla[tpu]=={release}", "-f", WHEEL_PAGE]
    subprocess.run([*command, "--upgrade"] if upgrade else command, check=True)
