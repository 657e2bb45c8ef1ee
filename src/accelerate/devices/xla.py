"""The few torch_xla calls we make, in one place."""

import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.base.environ import current, parse_flag_from_env
from accelerate.base.errors import StateError
from accelerate.base.versions import installed_version
from accelerate.devices.backend import DeviceBackend

if TYPE_CHECKING:
    import torch

DEVICES = Path("/dev")
WHEEL_PAGE = "https://storage.googleapis.com/libtpu-releases/index.html"


def count_chips(devices: Path = DEVICES) -> int:
    """Return how many TPU chips this machine has, without starting the runtime, which would take them.

    Args:
        devices: The folder of device files.
    """
    return len([*devices.glob("accel[0-9]*")] or [*devices.glob("vfio/[0-9]*")])


def xla_wanted() -> bool:
    """Return whether XLA may be used where it is installed (`USE_TORCH_XLA`, default yes)."""
    return parse_flag_from_env("USE_TORCH_XLA", default=True)


@dataclass(frozen=True)
class XlaBackend(DeviceBackend):
    """TPUs and other devices behind torch_xla."""

    def available(self) -> bool:
        return xla_wanted() and self.installed()

    def torch_module(self) -> Any:
        return import_module(self.module)

    def hardware(self) -> str:
        """Return what runs the graphs: `TPU`, `GPU`, `CUDA`, `CPU`, ..."""
        return str(self.torch_module().xla_device_hw(self.torch_module().xla_device()))

    def count(self) -> int:
        return int(import_module("torch_xla.runtime").addressable_device_count())

    def device(self, index: int | None = None) -> "torch.device":
        device: torch.device = self.torch_module().xla_device(index)
        return device

    def set_current(self, index: int) -> None:
        """Do nothing: the runtime gives each process its device."""

    def current(self) -> int:
        return int(import_module("torch_xla.runtime").local_ordinal())

    def synchronize(self) -> None:
        self.torch_module().wait_device_ops()

    def free_memory(self, index: int = 0) -> int:
        info = self.torch_module().get_memory_info(self.device(index))
        return int(info["bytes_limit"]) - int(info["bytes_used"])

    def total_memory(self, index: int = 0) -> int:
        return int(self.torch_module().get_memory_info(self.device(index))["bytes_limit"])

    def empty_cache(self) -> None:
        """Do nothing: the runtime holds the memory."""

    def seed(self, n: int) -> None:
        self.torch_module().set_rng_state(n)

    def rng_state(self) -> "torch.Tensor":
        import torch

        return torch.tensor(self.torch_module().get_rng_state())

    def set_rng_state(self, s: "torch.Tensor") -> None:
        self.torch_module().set_rng_state(int(s))

    def supports(self, dtype: "torch.dtype") -> bool:
        import torch

        if dtype == torch.float16 and self.hardware() == "TPU":  # it has no such numbers
            return False
        return str(dtype).removeprefix("torch.") not in self.lacks

    def grad_scaler(self, **kw: Any) -> "torch.amp.GradScaler":
        scaler: torch.amp.GradScaler = import_module("torch_xla.amp").GradScaler(**kw)
        return scaler


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that belongs to the installed torch, in a Google Colab notebook.

    Args:
        upgrade: Bring an installed torch_xla to that version too.

    Raises:
        StateError: If this is not Google Colab.
        subprocess.CalledProcessError: If pip fails; its output has been printed.
    """
    if "google.colab" not in sys.modules and "COLAB_RELEASE_TAG" not in current():
        raise StateError(
            "`install_xla` works in Google Colab only, and this is not a Colab notebook. "
            "Elsewhere, install torch_xla as its documentation says."
        )
    release = ".".join(map(str, installed_version("torch").release))
    command = [sys.executable, "-m", "pip", "install", f"torch_xla[tpu]=={release}", "-f", WHEEL_PAGE]
    subprocess.run([*command, "--upgrade"] if upgrade else command, check=True)
