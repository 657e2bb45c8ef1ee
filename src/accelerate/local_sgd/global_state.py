"""Global parameters and outer optimizer of DiLoCo in a checkpoint, which all ranks have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerate import checkpointing
from accelerate.base import CheckpointError
from accelerate.checkpointing import Change, CheckpointReader, Part, Payload, Stage
from accelerate.local_sgd.fragments import Exchange
from accelerate.local_sgd.states import check_tensors, trained_and_buffers
from accelerate.ops import KnownMean


@dataclass(frozen=True)
class GlobalState(Part):
    """State of DiLoCo that is equal on all ranks, with the means of exchanges that have started."""

    index: int
    owner: Any  # the DiLoCo

    @property
    def name(self) -> str:
        return checkpointing.number("diloco", self.index, ".bin")

    def files_of_rank(self, reader: CheckpointReader) -> set[str]:
        return {self.name} if self.name in (reader.names or ()) else set()

    def collect(self, writes_common: bool = True) -> list[Payload]:
        if not writes_common:
            return []
        owner = self.owner
        state = {
            "globals": self._globals(),
            "outer_optimizer": owner.outer_optimizer.state_dict(),
            "started": [fragment.started for fragment in owner.fragments],
            "exchanges": [
                {
                    "index": exchange.index,
                    "started": exchange.started,
                    "means": [mean.wait() for mean in exchange.means],
                }
                for exchange in owner.exchanges
            ],
        }
        return [Payload(self.name, state, partial(checkpointing.write_state, type(owner).__name__))]

    def read(self, reader: CheckpointReader) -> Change:
        if not reader.has(self.name):
            raise CheckpointError(
                f"{reader.folder} holds no {self.name}: it was saved without DiLoCo. To begin with its "
                "weights, create DiLoCo after load_state()."
            )
        state = reader.read(self.name)
        with reader.error_context(self.name, "DiLoCo"):
            check_tensors(self._globals(), state["globals"])
            saved, own = len(state["started"]), len(self.owner.fragments)
            if saved != own:
                raise CheckpointError(f"it has num_fragments={saved}, and this run has num_fragments={own}")
            checkpointing.check_optimizer(self.owner.outer_optimizer, state["outer_optimizer"])
        return Change(partial(self._apply, state), f"DiLoCo ({self.name})", Stage.COLLECTIVE)

    def _globals(self) -> dict[str, Tensor]:
        """Returns the global parameters by the names of the parameters of the model."""
        owner = self.owner
        inner = owner.accelerator._runtime.strategy.unwrap(owner.model, keep_compiled=False)
        names = {id(parameter): name for name, parameter in trained_and_buffers(inner)}
        pairs = zip(owner.parameters, owner.globals, strict=True)
        return {names[id(parameter)]: view.detach() for parameter, view in pairs}

    @torch.no_grad()
    def _apply(self, state: Mapping[str, Any]) -> None:
        owner = self.owner
        for exchange in owner.exchanges:  # other ranks take part in it
            for mean in exchange.means:
                mean.wait()
        for name, value in self._globals().items():
            value.copy_(state["globals"][name])
        owner.outer_optimizer.load_state_dict(state["outer_optimizer"])
        for fragment, started in zip(owner.fragments, state["started"], strict=True):
            fragment.started = started
        owner.exchanges[:] = [
            Exchange(each["index"], each["started"], [KnownMean(mean) for mean in each["means"]])
            for each in state["exchanges"]
        ]
