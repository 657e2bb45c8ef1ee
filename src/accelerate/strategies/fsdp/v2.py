"""FSDP 2: parameters are distributed tensors, sharded in place by torch's `fully_shard`.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from accelerate.strategies.bundle import Bundle, is_prepared
from accelerate.strategies.fsdp.parameters import named_parameters
from accelerate.strategies.fsdp.tensors import DistributedTensors


class FullyShard(DistributedTensors):
    """Sharding by FSDP 2."""

    gathers_shards = True

    def split(self, model: nn.Module) -> nn.Module:
        """Return the very model, with distributed tensors as parameters."""
        session = self.session
        shard = partial(session.functions().fsdp2_prepare_model, session.preparer, model)
        return self.follow(model, shard, named_parameters)

    def check(self, bundle: Bundle) -> None:
        """Let optimizers that were built on gathered parameters step the shards; then check as all do."""
        if any(not is_prepared(optimizer) for optimizer in bundle.optimizers):
            for model in self.session.prepared.models:
                self._free(model)
        super().check(bundle)

    def _free(self, model: nn.Module) -> None:
        """Free units that a forward has left gathered, and note which parameters stood for which."""
        gathered = named_parameters(model)
        for unit in units_of(model):
            unit.reshard()
        self.session.replace((gathered[name], shard) for name, shard in named_parameters(model).items())

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Fetch all units and keep them; afterwards they are freed and fetched as before."""
        frees = self.plugin.reshard_after_forward
        # The outermost unit, which comes first, is never freed after forward.
        units = [(unit, frees and inside) for model in models for inside, unit in enumerate(units_of(model))]
        for unit, _ in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit, is_freed in units:
                unit.set_reshard_after_forward(bool(is_freed), recurse=False)
                unit.reshard()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which units keep whole gradients instead of exchanging them."""
        return keeping_gradients(units_of(model))


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Return all units of a sharded model, also under torch.compile's wrapper."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def keeping_gradients(units: list[FSDPModule]) -> Iterator[None]:
    """Let units keep whole gradients instead of exchanging them."""
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
