"""What one kind of hardware is called and can do.

A row of the table is a `DeviceBackend`; the base class drives every torch module shaped like `torch.cuda`
(`is_available`, `device_count`, `set_device`, `mem_get_info`, ...). The CPU, Apple's GPU and Gaudi differ and
have a subclass here; XLA has one in `xla.py`.
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
    """One kind of hardware."""

    name: str  # the torch device type
    label: str  # what people call it, as the questionnaire and the tables print it
    distributed_type: DistributedType  # of plain data-parallel training on it
    module: str  # the torch module that drives it
    comm: str | None = None  # the process-group backend for its tensors; None: it takes part in no group
    visible_env: str | None = None  # the variable that restricts which devices a process sees
    rng_type: RNGType | None = None  # its generator in `rng_types`; None: it cannot be synchronised
    extension: str | None = None  # the package that adds it to torch; None: torch brings it
    own_scaler: bool = False  # its module has an `amp.GradScaler` of its own
    lacks: frozenset[str] = frozenset()  # names of torch dtypes it cannot compute in
    # Set while it is asked whether it is available: asking starts no driver, and the process can be forked.
    probe_variables: tuple[tuple[str, str], ...] = ()
    # Where all indices mean the same device, the largest that torch takes; None: they tell devices apart.
    largest_index: int | None = None
    binds_group: bool = False  # the default process group is bound to the device of each rank (`device_id`)
    own_runtime: bool = False  # its own runtime joins its processes, and not `torch.distributed`
    is_host: bool = False  # it is the processor, whose tensors are in the memory of the process
    # Its memory is the machine's: nothing is pinned, and device maps name it by its type without an index.
    shares_host_memory: bool = False
    is_addressable: bool = True  # its tensors are stretches of bytes that have an address
    has_float64: bool = False  # values are summed in float64 on it
    has_streams: bool = False  # copies from it are ordered by streams and events
    checks_fork: bool = False  # a process in which its driver was started cannot be forked
    notebook_variables: tuple[tuple[str, str], ...] = ()  # set while a notebook trains on one device
    deepspeed_variables: tuple[tuple[str, str], ...] = ()  # name it for DeepSpeed, which does not detect it

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
            text = "%s is installed but cannot be imported, %s is not used: %s"
            _logger.warning(text, self.extension, self.label, error)
            return False
        except AttributeError:  # this torch was built without it
            return False
        with patch_environment(**dict(self.probe_variables)):
            return bool(module.is_available())

    def torch_module(self) -> Any:
        """Return the torch module that drives it; an ImportError or AttributeError where there is none."""
        import torch

        if self.extension is not None:
            import_module(self.extension)
        return reduce(getattr, self.module.split(".")[1:], torch)

    def count(self) -> int:
        return int(self.torch_module().device_count())

    def device(self, index: int | None = None) -> "torch.device":
        """Return a device by its index in this process; None: the current one, without an index."""
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
        """Return what makes events with times on a device; None where it has no streams. Starts no device."""
        if not self.has_streams:
            return None
        from accelerate.devices.stream_events import StreamEvents

        is_capturing = getattr(self.torch_module(), "is_current_stream_capturing", lambda: False)
        return StreamEvents(device, is_capturing)

    def free_memory(self, index: int = 0) -> int:
        """Return how many bytes of a device are free; where the driver does not say, what torch leaves."""
        return self._memory(index)[0]

    def total_memory(self, index: int = 0) -> int:
        return self._memory(index)[1]

    def _memory(self, index: int) -> tuple[int, int]:
        """Bytes that are free, and all bytes."""
        module = self.torch_module()
        try:
            free, total = module.mem_get_info(index)
        except (AttributeError, RuntimeError) as error:  # modules of older versions; some Intel GPUs
            if isinstance(error, RuntimeError) and "doesn't support" not in str(error):
                raise
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
        self.torch_module().manual_seed_all(n)

    def rng_state(self) -> "torch.Tensor":
        """Return the state of the current device's generator, a uint8 tensor on the CPU."""
        return self.torch_module().get_rng_state()  # type: ignore[no-any-return]

    def set_rng_state(self, s: "torch.Tensor") -> None:
        """Set the current device's generator to a state that `rng_state` returned."""
        self.torch_module().set_rng_state(s)

    def supports(self, dtype: "torch.dtype") -> bool:
        name = str(dtype).removeprefix("torch.")
        ask = getattr(self.torch_module(), "is_bf16_supported", None) if name == "bfloat16" else None
        return name not in self.lacks and (ask is None or bool(ask()))

    def grad_scaler(self, **kw: Any) -> "torch.amp.GradScaler":
        """Return a gradient scaler; takes the arguments of `torch.amp.GradScaler` without the device."""
        import torch

        if self.own_scaler:
            return self.torch_module().amp.GradScaler(**kw)  # type: ignore[no-any-return]
        return torch.amp.GradScaler(self.name, **kw)


@dataclass(frozen=True)
class GenericBackend(DeviceBackend):
    """A device that another package registers with torch (`PrivateUse1`), driven through `torch.accelerator`.

    What that does not offer, such as generators, is asked of the device's torch module.
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
    """Intel's Gaudi, whose first generation does not compute in float16."""

    def is_first_generation(self) -> bool:
        """Return whether the devices are of the first generation; starts one."""
        return str(self.torch_module().get_device_name()).strip().upper() == "GAUDI"

    def supports(self, dtype: "torch.dtype") -> bool:
        return super().supports(dtype) and not (str(dtype) == "torch.float16" and self.is_first_generation())


@dataclass(frozen=True)
class OneDeviceBackend(DeviceBackend):
    """Hardware that is one device, whose memory is the machine's."""

    def count(self) -> int:
        return 1

    def device(self, index: int | None = None) -> "torch.device":
        import torch

        return torch.device(self.name)

    def set_current(self, index: int) -> None:
        """Do nothing: there is one."""

    def current(self) -> int:
        return 0

    def _memory(self, index: int) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)


@dataclass(frozen=True)
class CpuBackend(OneDeviceBackend):
    """The processor, whose generator is torch's default one."""

    def seed(self, n: int) -> None:
        import_module("torch").default_generator.manual_seed(n)

    def rng_state(self) -> "torch.Tensor":
        return import_module("torch").get_rng_state()  # type: ignore[no-any-return]

    def set_rng_state(self, s: "torch.Tensor") -> None:
        import_module("torch").set_rng_state(s)


@dataclass(frozen=True)
class MpsBackend(OneDeviceBackend):
    """Apple's GPU."""

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
