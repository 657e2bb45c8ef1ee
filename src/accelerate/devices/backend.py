"""Interface and implementations of hardware backends.

A row of the table in `hardware_table.py` is a `DeviceBackend`. The base class drives every torch module with
the interface of `torch.cuda` (`is_available`, `device_count`, `set_device`, `mem_get_info`, ...). The CPU,
Apple GPUs and Gaudi have a subclass here, and XLA has one in `xla.py`.
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

    from accelerate.devices.stream_events import StreamEvents

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceBackend:
    """Backend for one type of device."""

    name: str  # the torch device type
    label: str  # display name in the questionnaire and in tables
    distributed_type: DistributedType  # of data-parallel training on it
    module: str  # the torch module that drives it
    comm: str | None = None  # process group backend for its tensors, or None if it has none
    visible_env: str | None = None  # variable that restricts the devices that a process sees
    rng_type: RNGType | None = None  # generator in `rng_types`, or None if it cannot be synchronized
    extension: str | None = None  # package that adds it to torch, or None if torch includes it
    own_scaler: bool = False  # its torch module has an `amp.GradScaler`
    lacks: frozenset[str] = frozenset()  # names of unsupported torch dtypes
    # Set while availability is checked, so that the check starts no driver and the process can be forked.
    probe_variables: tuple[tuple[str, str], ...] = ()
    # Largest index that torch accepts where all indices name the same device. None: indices name devices.
    largest_index: int | None = None
    binds_group: bool = False  # the default process group is bound to the device of each rank (`device_id`)
    own_runtime: bool = False  # its runtime connects the processes instead of `torch.distributed`
    is_host: bool = False  # it is the CPU, whose tensors are in the memory of the process
    # It uses host memory, so that nothing is pinned, and device maps name it by its type without an index.
    shares_host_memory: bool = False
    is_addressable: bool = True  # its tensors have a data pointer
    has_float64: bool = False  # values are summed in float64 on it
    has_streams: bool = False  # copies from it are ordered by streams and events
    checks_fork: bool = False  # a process that has started its driver cannot be forked
    notebook_variables: tuple[tuple[str, str], ...] = ()  # set while a notebook trains on one device
    deepspeed_variables: tuple[tuple[str, str], ...] = ()  # select it in DeepSpeed, which does not detect it

    def distributed_type_of(self, size: int) -> DistributedType:
        """Returns the label of data-parallel training on a number of processes."""
        if size == 1 and not self.own_runtime:
            return DistributedType.NO
        if self.distributed_type == DistributedType.NO:  # hardware without a label of its own
            return DistributedType.MULTI_CPU
        return self.distributed_type

    def installed(self) -> bool:
        """Returns whether the package that adds this hardware to torch is installed, without importing it."""
        return self.extension is None or find_spec(self.extension.partition(".")[0]) is not None

    def available(self) -> bool:
        """Returns whether this process can use such a device.

        It starts no driver where that can be avoided.
        """
        if not self.installed():
            return False
        try:
            module = self.torch_module()
        except ImportError as error:
            text = "%s is installed but cannot be imported, %s is not used: %s"
            _logger.warning(text, self.extension, self.label, error)
            return False
        except AttributeError:  # this torch was built without it
            return False
        with patch_environment(**dict(self.probe_variables)):
            return bool(module.is_available())

    def torch_module(self) -> Any:
        """Returns the torch module that drives the device.

        Raises an ImportError or AttributeError where there is none.
        """
        import torch

        if self.extension is not None:
            import_module(self.extension)
        return reduce(getattr, self.module.split(".")[1:], torch)

    def count(self) -> int:
        return int(self.torch_module().device_count())

    def device(self, index: int | None = None) -> "torch.device":
        """Returns a device by its index in this process, or the current device without an index."""
        import torch

        if index is None:
            return torch.device(self.name)
        if index < 0:
            raise wrong_value("index", index, f"no {self.label} has a negative number", "count from 0")
        return torch.device(self.name, index)

    def set_current(self, index: int) -> None:
        self.torch_module().set_device(index)

    def current(self) -> int:
        return int(self.torch_module().current_device())

    def synchronize(self) -> None:
        self.torch_module().synchronize()

    def timed_events(self, device: "torch.device") -> "StreamEvents | None":
        """Returns a factory of timing events for a device, or None where it has no streams.

        It starts no device.
        """
        if not self.has_streams:
            return None
        from accelerate.devices.stream_events import StreamEvents

        is_capturing = getattr(self.torch_module(), "is_current_stream_capturing", lambda: False)
        return StreamEvents(device, is_capturing)

    def free_memory(self, index: int = 0) -> int:
        """Returns the free memory of a device in bytes.

        Where the driver does not report it, this is the memory that torch has not reserved.
        """
        return self._memory(index)[0]

    def total_memory(self, index: int = 0) -> int:
        return self._memory(index)[1]

    def _memory(self, index: int) -> tuple[int, int]:
        """Returns the free and the total bytes of memory."""
        module = self.torch_module()
        try:
            free, total = module.mem_get_info(index)
        except (AttributeError, RuntimeError) as error:  # older versions, and some Intel GPUs
            if isinstance(error, RuntimeError) and "doesn't support" not in str(error):
                raise
            total = module.get_device_properties(index).total_memory
            free = total - module.memory_reserved(index)
        return int(free), int(total)

    def prevents_fork(self) -> bool:
        """Returns whether this process has started the driver, which a fork of it could not use."""
        return self.checks_fork and bool(self.torch_module().is_initialized())

    def empty_cache(self) -> None:
        """Releases cached memory that torch does not use, if the torch module has a cache."""
        empty = getattr(self.torch_module(), "empty_cache", None)
        if empty is not None:
            empty()

    def seed(self, n: int) -> None:
        self.torch_module().manual_seed_all(n)

    def rng_state(self) -> "torch.Tensor":
        """Returns the state of the generator of the current device as a uint8 tensor on the CPU."""
        return self.torch_module().get_rng_state()  # type: ignore[no-any-return]

    def set_rng_state(self, s: "torch.Tensor") -> None:
        """Sets the generator of the current device to a state returned by `rng_state`."""
        self.torch_module().set_rng_state(s)

    def supports(self, dtype: "torch.dtype") -> bool:
        name = str(dtype).removeprefix("torch.")
        ask = getattr(self.torch_module(), "is_bf16_supported", None) if name == "bfloat16" else None
        return name not in self.lacks and (ask is None or bool(ask()))

    def grad_scaler(self, **kw: Any) -> "torch.amp.GradScaler":
        """Returns a gradient scaler.

        Accepts the arguments of `torch.amp.GradScaler` without the device.
        """
        import torch

        if self.own_scaler:
            return self.torch_module().amp.GradScaler(**kw)  # type: ignore[no-any-return]
        return torch.amp.GradScaler(self.name, **kw)


@dataclass(frozen=True)
class GenericBackend(DeviceBackend):
    """Device that another package registers with torch (`PrivateUse1`), driven by `torch.accelerator`.

    Functions that `torch.accelerator` lacks, such as generators, come from the torch module of the device.
    """

    def count(self) -> int:
        import torch

        return torch.accelerator.device_count()

    def set_current(self, index: int) -> None:
        import torch

        torch.accelerator.set_device_index(index)

    def current(self) -> int:
        import torch

        return torch.accelerator.current_device_index()

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize()


@dataclass(frozen=True)
class GaudiBackend(DeviceBackend):
    """Intel Gaudi, whose first generation does not compute in float16."""

    def is_first_generation(self) -> bool:
        """Returns whether the devices are of the first generation.

        It starts a device.
        """
        return str(self.torch_module().get_device_name()).strip().upper() == "GAUDI"

    def supports(self, dtype: "torch.dtype") -> bool:
        return super().supports(dtype) and not (str(dtype) == "torch.float16" and self.is_first_generation())


@dataclass(frozen=True)
class OneDeviceBackend(DeviceBackend):
    """Hardware with a single device that uses host memory."""

    def count(self) -> int:
        return 1

    def device(self, index: int | None = None) -> "torch.device":
        import torch

        return torch.device(self.name)

    def set_current(self, index: int) -> None:
        """Does nothing because there is one device."""

    def current(self) -> int:
        return 0

    def _memory(self, index: int) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)


@dataclass(frozen=True)
class CpuBackend(OneDeviceBackend):
    """CPU, whose generator is the default generator of torch."""

    def seed(self, n: int) -> None:
        import_module("torch").default_generator.manual_seed(n)

    def rng_state(self) -> "torch.Tensor":
        return import_module("torch").get_rng_state()  # type: ignore[no-any-return]

    def set_rng_state(self, s: "torch.Tensor") -> None:
        import_module("torch").set_rng_state(s)


@dataclass(frozen=True)
class MpsBackend(OneDeviceBackend):
    """Apple GPU."""

    def available(self) -> bool:
        import torch

        return torch.backends.mps.is_available()

    def seed(self, n: int) -> None:
        self.torch_module().manual_seed(n)

    def supports(self, dtype: "torch.dtype") -> bool:
        import torch

        if dtype == torch.bfloat16:
            return torch.backends.mps.is_macos_or_newer(14, 0)
        return super().supports(dtype)
