"""Interface of a mesh axis, a dimension of the device mesh that shards layers, experts or sequences.

`resolve_axes` creates the axes of a run. Strategies and `Accelerator` call their hooks while they prepare
objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn


class Axis:
    """Base class of mesh axes, which splits nothing by default.

    A subclass overrides the hooks in which its axis takes part. The strategy and `Accelerator` call them on
    all ranks:

    1. `check_model`, for each model before anything is changed.
    2. `transform_model`, for each model before it is wrapped. An axis that shards weights replaces parameters
       or submodules here. An axis that splits a batch into micro-batches returns a module that runs them in
       its forward.
    3. `transform_loader`, for each loader after its model.
    4. `split_batch`, around the forward and backward pass of each batch.

    An axis does not average gradients and does not save states. The strategy does, from the placements of the
    parameters.
    """

    size: int = 1
    splits_buffers: bool = False  # whether `split_batch` splits tensors of the training loop
    groups: Any = None  # process groups in the form that an engine takes, or None

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a model that the axis cannot transform."""

    def find_experts(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules of a model whose experts the axis shards."""
        return []

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        """Returns the model that runs this rank's part of each batch, which is `model` itself by default.

        Args:
            model: A model that is not wrapped yet. It may be changed in place.
            micro_batch_size: Samples of a rank in one forward.
        """
        return model

    def transform_loader(self, loader: Any, model: Any) -> Any:
        """Returns a loader of this rank's part of each batch, which is `loader` itself by default.

        Args:
            loader: A prepared loader.
            model: The prepared model.
        """
        return loader

    def split_batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Returns a context manager for the forward and backward pass of one batch.

        Args:
            buffers: Tensors that are equal on all ranks of the axis, and are split in place.
            buffer_seq_dims: Dimension of each buffer to split.
            no_restore_buffers: Buffers that are not restored at the end.
        """
        return nullcontext()


class Axes(NamedTuple):
    """Mesh axes of a run that shard layers, sequences or experts."""

    tensor: Axis = Axis()  # shards the weights of layers
    sequence: Axis = Axis()  # shards the sequences of a batch
    expert: Axis = Axis()  # shards the experts of layers, whose ranks have different batches
    pipeline: Any = None  # `PipelineAxis`, whose ranks have different layers, or None
