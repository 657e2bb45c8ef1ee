"""What a part gets: the device, the sizes, a folder of its own, and a list for its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Size = TypeVar("Size")


class NotAvailableError(Exception):
    """This device or machine lacks what a part measures; the message says what."""


@dataclass(frozen=True)
class Figure:
    """One measured value, with the range that is accepted for it."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the value is in the range; None without a budget."""
        if self.at_most is None and self.at_least is None:
            return None
        too_large = self.at_most is not None and self.value > self.at_most
        return not too_large and (self.at_least is None or self.value >= self.at_least)


@dataclass
class Setting:
    """The arguments of every part.

    Attributes:
        device: type of the device, as torch names it.
        tiny: whether sizes are so small that figures mean nothing; budgets do not count then.
        folder: empty; also the working directory of the part.
        imports: modules to import before torch is used, which register a device.
        results: what is known of the run so far, as `results.json` has it.
    """

    device: str
    tiny: bool
    folder: Path
    imports: tuple[str, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def size(self, full: Size, tiny: Size) -> Size:
        return tiny if self.tiny else full

    def report(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Add a figure; its budget counts at full size only."""
        assert math.isfinite(value), f"{name} is {value}"
        budget = (None, None) if self.tiny else (at_most, at_least)
        self.figures.append(Figure(name, float(value), unit, *budget))

    def note(self, text: str) -> None:
        """Add a line to the results: what a figure leaves out, and why."""
        self.notes.append(text)

    @property
    def is_host(self) -> bool:
        return self.device == "cpu"

    @property
    def backend(self) -> Any:
        """The row of the hardware table."""
        import torch

        from accelerate.devices import of_device

        return of_device(torch.device(self.device))

    def make_accelerator(self, **choices: Any) -> Any:
        """Return an `Accelerator` of a fresh state, which must be on the device of this run."""
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(**choices)
        assert accelerator.device.type == self.device, f"Accelerator took {accelerator.device}"
        return accelerator

    def synchronize(self) -> None:
        self.backend.synchronize()

    def time(self, work: Callable[[], object]) -> float:
        """Return seconds until all that `work` has started on the device is done."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def require(self, dtype: str) -> None:
        """End the part where the device does not compute in a number format."""
        import torch

        if not self.backend.supports(getattr(torch, dtype)):
            raise NotAvailableError(f"{self.device} does not compute in {dtype}")

    def limit_memory(self, size: int) -> bool:
        """Let this process have so many bytes of the device; return whether the device can limit that."""
        limit = getattr(self.backend.torch_module(), "set_per_process_memory_fraction", None)
        if self.is_host or limit is None:
            return False
        limit(min(1.0, size / self.backend.total_memory(0)))
        return True

    def allocated(self) -> int | None:
        """Return bytes of the device that tensors take; None where the device does not count them."""
        import torch

        return None if self.is_host else int(torch.accelerator.memory_allocated())
