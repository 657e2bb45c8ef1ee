"""Tensor parallelism without FSDP: processes share each layer; groups of them may hold copies."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from accelerate.strategies.axes import TensorAxis
from accelerate.strategies.fsdp import (
    DistributedTensors,
    keeping_gradients,
    named_parameters,
    split_by_dtype,
    units_of,
)


class TensorParallel(DistributedTensors):
    """All processes share each layer, and each batch."""

    distributed_type = None  # the label is that of the hardware

    def split(self, model: nn.Module) -> nn.Module:
        """Return the very model, with parameters of the layers in its plan sharded over the axis."""
        model = model.to(self.context.device)
        return self.follow(model, lambda: self._share(model), named_parameters)

    def _share(self, model: nn.Module) -> nn.Module:
        TensorAxis(self.context.mesh).transform([model])
        return model


class CopiedTensorParallel(TensorParallel):
    """Groups of processes share each layer; the backward pass averages gradients over the groups."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass averages nothing."""
        return keeping_gradients(units_of(model))

    def _share(self, model: nn.Module) -> nn.Module:
        """Let FSDP 2 average: to shard over one process is to hold a copy."""
        mesh = copying_mesh(self.context.mesh)
        units = split_by_dtype(model, [], set())
        TensorAxis(mesh).transform([model])
        for unit in (*units, model):
            fully_shard(unit, mesh=mesh["copies", "one"], reshard_after_forward=False)
        return model


def copying_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of all copies, an axis of one process, and the axis that shares layers."""
    shared = mesh["tp"].size()
    shape = (mesh.size() // shared, 1, shared)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("copies", "one", "tp"))
