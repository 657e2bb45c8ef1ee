"""What one kind of hardware is called and can do.

A row of the table is a `DeviceBackend`; the base class drives every torch module shaped like `torch.cuda`
(`is_available`, `device_count`, `set_device`, `mem_get_info`, ...). The CPU and Apple's GPU differ and have a
subclass here; XLA has one in `xla.py`.
"""

import logging
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accelerate.base import DistributedType, RNGType, patch_environment, wrong_value

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceBackend:
    """One kind of hardware.

    Attributes:
        name: The torch device type.
        label: What people call it, as the questionnaire and the tables print it.
        distributed_type: The label of plain data-parallel training on it.
        comm: The torch process-group backend for its tensors; None: it cannot take part in a group.
        visible_env: The variable that restricts which of its devices a process sees; None: there is none.
        module: The torch module that drives it.
        rng_type: How its random generator is called in `rng_types`; None: it cannot be synchronised.
        extension: The package that adds it to torch; None: torch brings it.
        own_scaler: Whether its module has an `amp.GradScaler` of its own instead of torch's common one.
        lacks: Names of torch dtypes it cannot compute in.
        probe_variables: Variables set while it is asked whether it is available, so that asking starts no
            driver and the process can still be forked.
        largest_index: The largest number that torch takes in the name of a device where all numbers mean the
            same device, as for the CPU; None: numbers tell devices apart.
        binds_group: Whether the default process group is bound to the device of each rank (`device_id`).
        own_runtime: Whether its own runtime joins its processes, and not `torch.distributed`.
        is_host: Whether it is the processor, whose tensors are in the memory of the process.
        shares_host_memory: Whether its memory is the machine's: nothing is pinned, and device maps name it
            by its type and not by a number.
        is_addressable: Whether its tensors are stretches of bytes that have an address.
        has_float64: Whether values are summed in float64 on it.
        has_streams: Whether copies from it are ordered by streams and events.
        checks_fork: Whether a process in which its driver was started cannot be forked.
        notebook_variables: Variables set while a notebook trains on one such device.
        deepspeed_variables: Variables that name it for DeepSpeed, where DeepSpeed does not detect it.
    """

    name: str
    label: str
    distributed_type: DistributedType
    comm: str | None
    visible_env: str | None
    module: str
    rng_type: RNGType | None = None
    extension: str | None = None
    own_scaler: bool = False
    lacks: frozenset[str] = frozenset()
    probe_variables: tuple[tuple[str, str], ...] = ()
    largest_index: int | None = None
    binds_group: bool = False
    own_runtime: bool = False
    is_host: bool = False
    shares_host_memory: bool = False
    is_addressable: bool = True
    has_float64: bool = False
    has_streams: bool = False
    checks_fork: bool = False
    notebook_variables: tuple[tuple[str, str], ...] = ()
    deepspeed_variables: tuple[tuple[str, str], ...] = ()

    def installed(self) -> bool:
        """Return whether the package that adds this hardware to torch is there, without importing it."""
        return self.extension is None or find_spec(self.extension.partition(".")[0]) is not None

    def available(self) -> bool:
        """Return whether this process can use such a device; starts no driver where that can be avoided."""
        if not self.installed():
            return False
        try:
            module = self.torch_module()
        except ImportError as error:
            _logger.warning(
                "%s is installed but cannot be imported, %s is not used: %s",
                self.extension,
                self.label,
                error,
            )
            return False
        except AttributeError:  # this torch was built without it
            return False
        with patch_environment(**dict(self.probe_variables)):
            return bool(module.is_available())

    def torch_module(self) -> Any:
        """Return the torch module that drives it.

        Raises:
            ImportError: If its extension cannot be imported.
            AttributeError: If this torch has no such module.
        """
        import torch

        if self.extension is not None:
            import_module(self.extension)
        return reduce(getattr, self.module.split(".")[1:], torch)

    def count(self) -> int:
        """Return how many devices this process sees."""
        return int(self.torch_module().device_count())

    def device(self, index: int | None = None) -> "torch.device":
        """Return a device.

        Args:
            index: Which one, as this process numbers them; None: the current one, without a number.

        Raises:
            ConfigurationError: If the number is negative.
        """
        import torch

        if index is None:
            return torch.device(self.name)
        if index < 0:
            raise wrong_value("index", index, f"no {self.label} has a negative number", "count from 0")
        return torch.device(self.name, index)

    def set_current(self, index: int) -> None:
        """Make one device the current one of this process."""
        self.torch_module().set_device(index)

    def current(self) -> int:
        """Return the number of the current device."""
        return int(self.torch_module().current_device())

    def synchronize(self) -> None:
        """Wait until the current device has done all work given to it."""
        self.torch_module().synchronize()

    def free_memory(self, index: int = 0) -> int:
        """Return how many bytes of a device are free; where the driver does not say, what torch leaves."""
        return self._memory(index)[0]

    def total_memory(self, index: int = 0) -> int:
        """Return how many bytes a device has."""
        return self._memory(index)[1]

    def _memory(self, index: int) -> tuple[int, int]:
        """Bytes that are free, and all bytes."""
        module = self.torch_module()
        try:
            free, total = module.mem_get_info(index)
        except AttributeError:  # modules of older versions
            free = None
        except RuntimeError as error:
            if "doesn't support" not in str(error):  # some Intel GPUs cannot tell
                raise
            free = None
        if free is None:
            total = module.get_device_properties(index).total_memory
            free = total - module.memory_reserved(index)
        return int(free), int(total)

    def prevents_fork(self) -> bool:
        """Return whether this process has started its driver, and a fork of it could not use it."""
        return self.checks_fork and bool(self.torch_module().is_initialized())

    def empty_cache(self) -> None:
        """Give memory that torch holds but does not use back; nothing where its module keeps no cache."""
        empty = getattr(self.torch_module(), "empty_cache", None)
        if empty is not None:
            empty()

    def seed(self, n: int) -> None:
        """Seed the generators of all its devices."""
        self.torch_module().manual_seed_all(n)

    def rng_state(self) -> "torch.Tensor":
        """Return the state of the current device's generator, a uint8 tensor on the CPU."""
        state: torch.Tensor = self.torch_module().get_rng_state()
        return state

    def set_rng_state(self, s: "torch.Tensor") -> None:
        """Set the current device's generator to a state that `rng_state` returned."""
        self.torch_module().set_rng_state(s)

    def supports(self, dtype: "torch.dtype") -> bool:
        """Return whether it computes in this dtype."""
        import torch

        if str(dtype).removeprefix("torch.") in self.lacks:
            return False
        if dtype != torch.bfloat16:
            return True
        ask = getattr(self.torch_module(), "is_bf16_supported", None)
        return ask is None or bool(ask())

    def grad_scaler(self, **kw: Any) -> "torch.amp.GradScaler":
        """Return a gradient scaler for it.

        Args:
            **kw: Arguments of `torch.amp.GradScaler` without the device.
        """
        import torch

        if not self.own_scaler:
            return torch.amp.GradScaler(self.name, **kw)
        scaler: torch.amp.GradScaler = self.torch_module().amp.GradScaler(**kw)
        return scaler


@dataclass(frozen=True)
class GaudiBackend(DeviceBackend):
    """Intel's Gaudi, whose first generation does not compute in float16."""

    def is_first_generation(self) -> bool:
        """Return whether the devices are of the first generation; starts one."""
        return str(self.torch_module().get_device_name()).strip().upper() == "GAUDI"

    def supports(self, dtype: "torch.dtype") -> bool:
        import torch

        return super().supports(dtype) and not (dtype == torch.float16 and self.is_first_generation())


@dataclass(frozen=True)
class CpuBackend(DeviceBackend):
    """The processor: one device, always there, its memory is the machine's."""

    def available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def device(self, index: int | None = None) -> "torch.device":
        import torch

        return torch.device(self.name)

    def set_current(self, index: int) -> None:
        """Do nothing: there is one."""

    def current(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Do nothing: its work is done when the call returns."""

    def free_memory(self, index: int = 0) -> int:
        import psutil

        return int(psutil.virtual_memory().available)

    def total_memory(self, index: int = 0) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    def empty_cache(self) -> None:
        """Do nothing: torch keeps no cache of host memory."""

    def seed(self, n: int) -> None:
        import torch

        torch.default_generator.manual_seed(n)

    def rng_state(self) -> "torch.Tensor":
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, s: "torch.Tensor") -> None:
        import torch

        torch.set_rng_state(s)

    def supports(self, dtype: "torch.dtype") -> bool:
        return True


@dataclass(frozen=True)
class MpsBackend(CpuBackend):
    """Apple's GPU: one device that shares the machine's memory."""

    def available(self) -> bool:
        import torch

        return torch.backends.mps.is_available()

    def synchronize(self) -> None:
        self.torch_module().synchronize()

    def empty_cache(self) -> None:
        self.torch_module().empty_cache()

    def seed(self, n: int) -> None:
        self.torch_module().manual_seed(n)

    def rng_state(self) -> "torch.Tensor":
        state: torch.Tensor = self.torch_module().get_rng_state()
        return state

    def set_rng_state(self, s: "torch.Tensor") -> None:
        self.torch_module().set_rng_state(s)

    def supports(self, dtype: "torch.dtype") -> bool:
        import torch

        if dtype == torch.bfloat16:
            return torch.backends.mps.is_macos_or_newer(14, 0)
        return str(dtype).removeprefix("torch.") not in self.lacks
