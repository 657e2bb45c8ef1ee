"""Tensor parallelism alone: all processes share each layer, and each batch."""

from __future__ import annotations

from torch import nn

from accelerate.strategies.axes.layers import split_layers
from accelerate.strategies.fsdp.parameters import named_parameters
from accelerate.strategies.fsdp.tensors import DistributedTensors


class TensorParallel(DistributedTensors):
    """All processes share each layer, and each batch."""

    distributed_type = None  # the label is that of the hardware

    def split(self, model: nn.Module) -> nn.Module:
        """Return the very model, with parameters of the layers in its plan spread over all ranks."""
        model = model.to(self.context.device)
        return self.follow(model, lambda: split_layers(model, self.context.mesh), named_parameters)
