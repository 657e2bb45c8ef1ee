"""State of ranks that train separately in a checkpoint, with a file for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerate import checkpointing, strategies
from accelerate.base import CheckpointError, StateError, listed
from accelerate.checkpointing import Change, CheckpointReader, Payload, Stage


@dataclass(frozen=True)
class RankState:
    """Weights, buffers and optimizer states of this rank, which differ from those of other ranks.

    With another number of ranks, each continues with the state of one of the ranks that were saved.
    """

    index: int
    owner: Any  # the LocalSGD

    def collect(self, writes_common: bool = True) -> list[Payload]:
        objects = self._objects()
        state = {
            "num_steps": self.owner.num_steps,
            "tensors": self._tensors(),
            "averages": [average.tensors() for average in objects["averages"]],
            **{
                kind: [each.state_dict() for each in objects[kind]]
                for kind in ("optimizers", "schedulers", "scalers")
            },
        }
        write = partial(checkpointing.write_state, type(self.owner).__name__)
        return [Payload(self._name_of(self._runtime.state.process_index), state, write)]

    def read(self, reader: CheckpointReader) -> Change:
        if self.owner.is_applied:
            raise StateError("load_state() inside of applied() of DiLoCo: leave the block before the load.")
        name = self.file_read(reader)
        if name is None:
            return checkpointing.no_change
        kind, state = type(self.owner).__name__, reader.read(name)
        with reader.error_context(name, kind):
            self._check(state)
        return Change(partial(self._apply, state), f"{kind} ({name})", Stage.COLLECTIVE)

    def file_read(self, reader: CheckpointReader) -> str | None:
        """Returns the name of the file that this rank reads, or None if there is none."""
        own = self._name_of(self._runtime.state.process_index)
        pattern = re.compile(rf"{self._name_of('')[:-4]}\d+\.bin")
        num_saved = sum(pattern.fullmatch(name) is not None for name in reader.names or ())
        if num_saved:
            own = self._name_of(self._runtime.state.process_index % num_saved)
            reader.requested.update(map(self._name_of, range(num_saved)))
        return own if num_saved or reader.has(own) else None

    @property
    def _runtime(self) -> Any:
        return self.owner.accelerator._runtime

    def _name_of(self, rank: Any) -> str:
        return f"local_sgd_{self.index}_{rank}.bin"

    def _objects(self) -> dict[str, list[Any]]:
        """Returns the other objects whose states differ between ranks."""
        prepared, scaler = self._runtime.prepared, self._runtime.strategy.precision.scaler
        own = set(map(id, self.owner.model.parameters()))
        return {
            "optimizers": [
                each for each in prepared.optimizers if not own.isdisjoint(map(id, each.parameters()))
            ],
            "schedulers": prepared.schedulers,
            "scalers": [] if scaler is None else [scaler],
            "averages": [each for each in prepared.averages if each.model is self.owner.model],
        }

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the trained parameters and the buffers of the model on this rank."""
        inner = self._runtime.strategy.unwrap(self.owner.model, keep_compiled=False)
        return {name: tensor.detach() for name, tensor in trained_and_buffers(inner)}

    def _check(self, state: Any) -> None:
        """Raises for a state that does not fit the objects of this run."""
        check_tensors(self._tensors(), state["tensors"])
        for kind, objects in self._objects().items():
            if len(state[kind]) != len(objects):
                raise CheckpointError(f"it has {len(state[kind])} {kind}, and this run has {len(objects)}")
        for optimizer, saved in zip(self._objects()["optimizers"], state["optimizers"], strict=True):
            checkpointing.check_optimizer(optimizer, saved)

    @torch.no_grad()
    def _apply(self, state: Mapping[str, Any]) -> None:
        self.owner.num_steps = state["num_steps"]
        for name, tensor in self._tensors().items():
            tensor.copy_(state["tensors"][name])
        objects = self._objects()
        for kind in ("optimizers", "schedulers", "scalers"):
            for each, saved in zip(objects[kind], state[kind], strict=True):
                each.load_state_dict(saved)
        for average, saved in zip(objects["averages"], state["averages"], strict=True):
            torch._foreach_copy_(average.tensors(), saved)


def trained_and_buffers(inner: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the trained parameters of a module and its buffers by name, each once."""
    seen: set[int] = set()
    for name, parameter in strategies.dtensors.named_parameters(inner).items():
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
    yield from inner.named_buffers()


def check_tensors(own: Mapping[str, Tensor], saved: Any) -> None:
    """Raises for tensors in a checkpoint that have other names or shapes."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"it holds a {type(saved).__name__} in place of tensors")
    if names := set(own) ^ set(saved):
        raise CheckpointError(f"only one of the two has {listed(sorted(names))}")
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            shapes = tuple(saved[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"{name} has the shape {shapes[0]} in it, and {shapes[1]} in this run")
