"""State of ranks that train separately in a checkpoint, with a file for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerate import accelerator, checkpointing, strategies
from accelerate.base import CheckpointError, StateError, listed
from accelerate.checkpointing import Change, CheckpointReader, Part, Payload, Stage, StateItem

KINDS = ("optimizers", "schedulers", "scalers", "averages")
"""Kinds of items whose states differ between ranks that train separately."""


@dataclass(frozen=True)
class RankState(Part):
    """Weights, buffers and optimizer states of this rank, which differ from those of other ranks.

    With another number of ranks, each continues with the state of one of the ranks that were saved.
    """

    index: int
    owner: Any  # the LocalSGD

    def collect(self, writes_common: bool = True) -> list[Payload]:
        own = {"num_steps": self.owner.num_steps, "tensors": self._tensors()}
        state = {**own, **checkpointing.capture_items(self._items())}
        write = partial(checkpointing.write_state, type(self.owner).__name__)
        return [Payload(self._name_of(self._runtime.state.process_index), state, write)]

    def read(self, reader: CheckpointReader) -> Change:
        if self.owner.is_applied:
            raise StateError("load_state() inside of applied() of DiLoCo: leave the block before the load.")
        name = next(iter(self.files_of_rank(reader)), None)
        if name is None:
            return checkpointing.no_change
        kind, state = type(self.owner).__name__, reader.read(name)
        with reader.error_context(name, kind):
            self._check(state)
        return Change(partial(self._apply, state), f"{kind} ({name})", Stage.COLLECTIVE)

    def files_of_rank(self, reader: CheckpointReader) -> set[str]:
        own = self._name_of(self._runtime.state.process_index)
        pattern = re.compile(rf"{self._name_of('')[:-4]}\d+\.bin")
        num_saved = sum(pattern.fullmatch(name) is not None for name in reader.names or ())
        if num_saved:
            own = self._name_of(self._runtime.state.process_index % num_saved)
            reader.requested.update(map(self._name_of, range(num_saved)))
        return {own} if num_saved or reader.has(own) else set()

    @property
    def _runtime(self) -> Any:
        return self.owner.accelerator._runtime

    def _name_of(self, rank: object) -> str:
        return f"local_sgd_{self.index}_{rank}.bin"

    def _items(self) -> list[StateItem]:
        """Returns the other objects whose states differ between ranks."""
        parameters = set(map(id, self.owner.model.parameters()))

        def differs(item: StateItem) -> bool:
            if item.kind == "optimizers":
                return not parameters.isdisjoint(map(id, item.owner.parameters()))
            return item.kind != "averages" or item.owner.model is self.owner.model

        items = accelerator.state_items.list_items(self._runtime.strategy)
        return [item for item in items if item.kind in KINDS and differs(item)]

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the trained parameters and the buffers of the model on this rank."""
        inner = self._runtime.strategy.unwrap(self.owner.model, keep_compiled=False)
        return {name: tensor.detach() for name, tensor in trained_and_buffers(inner)}

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raises for a state that does not fit the objects of this run."""
        check_tensors(self._tensors(), state["tensors"])
        items, states = self._items(), {kind: state.get(kind, ()) for kind in KINDS}
        checkpointing.check_items(items, states)
        optimizers = (item.owner for item in items if item.kind == "optimizers")
        for optimizer, saved in zip(optimizers, states["optimizers"], strict=True):
            checkpointing.check_optimizer(optimizer, saved)

    @torch.no_grad()
    def _apply(self, state: Mapping[str, Any]) -> None:
        self.owner.num_steps = state["num_steps"]
        for name, tensor in self._tensors().items():
            tensor.copy_(state["tensors"][name])
        checkpointing.apply_items(self._items(), state)


def trained_and_buffers(inner: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the trained parameters of a module and its buffers by name, each once."""
    seen: set[int] = set()
    for name, parameter in strategies.dtensors.named_parameters(inner).items():
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
    yield from inner.named_buffers()


def check_tensors(own: Mapping[str, Tensor], saved: object) -> None:
    """Raises for tensors in a checkpoint that have other names or shapes."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"it holds a {type(saved).__name__} in place of tensors")
    if names := set(own) ^ set(saved):
        raise CheckpointError(f"only one of the two has {listed(sorted(names))}")
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            shapes = tuple(saved[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"{name} has the shape {shapes[0]} in it, and {shapes[1]} in this run")
