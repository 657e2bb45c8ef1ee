"""Local SGD, in which processes train separately and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch

from accelerate.accelerator import Accelerator
from accelerate.base import PreparationError, StateError, wrong_value
from accelerate.checkpointing import Part
from accelerate.local_sgd.states import RankState
from accelerate.parallelism_config import Data, axes_with
from accelerate.state import mesh_sizes
from accelerate.strategies import owners_of

Self = TypeVar("Self", bound="LocalSGD")


class LocalSGD:
    """Context manager that averages the parameters every few steps, instead of the gradients in each step.

    ```python
    with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        for batch in loader:
            with accelerator.accumulate(model):
                ...
                optimizer.step()
                local_sgd.step()
    ```

    On one process it has no effect. Buffers, such as the statistics of batch normalization, are not averaged.
    `save_state` saves the weights and optimizer states of each rank, which differ.

    Args:
        accelerator: `Accelerator` that prepared the model.
        model: Prepared model, of which each rank has all parameters.
        local_sgd_steps: Calls of `step` between two averages.
        enabled: False disables it.

    Raises:
        ConfigurationError: `local_sgd_steps` is less than 1.
        PreparationError: The model is sharded over the ranks, or several ranks train on one batch.
    """

    is_applied: bool = False  # whether the model has other weights for an evaluation

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1 or local_sgd_steps != int(local_sgd_steps):
            reason = "not an interval"
            raise wrong_value("local_sgd_steps", local_sgd_steps, reason, "Give an integer of at least 1")
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled and not accelerator._runtime.strategy.holds_whole_models:
            raise PreparationError(
                f"{type(self).__name__} averages whole models, and under {accelerator.distributed_type} a "
                "rank has only a shard. Train without it, or with plain data parallelism."
            )
        if self.enabled:
            self._refuse_shared_batches(accelerator)
        self.num_steps = 0
        self.accelerator = accelerator
        models = accelerator._runtime.prepared.models  # `no_sync` needs the wrapper
        self.model = next((each for each in models if accelerator.unwrap_model(each) is model), model)
        self.local_sgd_steps = local_sgd_steps
        self.model_sync_obj: AbstractContextManager[Any] | None = None
        if self.enabled:
            self._register()

    def __enter__(self: Self) -> Self:
        if self.model_sync_obj is not None:
            raise StateError(
                f"Blocks of one {type(self).__name__} cannot be nested. Leave the outer block first."
            )
        if self.enabled and self.accelerator.use_distributed:
            self._refuse_owners()
        if self.enabled:
            self.model_sync_obj = self.accelerator.no_sync(self.model)
            self.model_sync_obj.__enter__()
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Averages once more, unless the block has failed, because other ranks may not call it."""
        if self.model_sync_obj is None:
            return
        try:
            if type is None:
                self._sync_and_avg_model_params()
        finally:
            self.model_sync_obj.__exit__(type, value, tb)
            self.model_sync_obj = None

    def step(self) -> None:
        """Counts one step, and averages the parameters at the end of each interval.

        Called on all ranks in each step.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._sync_and_avg_model_params()

    @torch.no_grad()
    def _sync_and_avg_model_params(self) -> None:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        averages = self.accelerator.reduce(parameters, reduction="mean")
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.copy_(average)

    def _refuse_shared_batches(self, accelerator: Accelerator) -> None:
        """Raises an error if several ranks train on the sequences of one batch, in each step together."""
        sizes = mesh_sizes(accelerator.torch_device_mesh)
        names = (*axes_with(Data.SEQUENCES), *axes_with(Data.COPIES))
        if shared := [f"{name}_size={sizes[name]}" for name in names if sizes.get(name, 1) > 1]:
            raise PreparationError(
                f"{type(self).__name__} trains each rank separately, and the ranks of {', '.join(shared)} "
                "train on one batch together. Set a size of 1, or train without it."
            )

    def _refuse_owners(self) -> None:
        """Raises an error for optimizers of which each rank steps some matrices for all ranks."""
        optimizers = self.accelerator._runtime.prepared.optimizers
        owned = [each for each in optimizers if owners_of(each) is not None]
        if names := [type(each.optimizer).__name__ for each in owned]:
            raise PreparationError(
                f"{type(self).__name__} trains each rank separately, and the ranks share the matrices of "
                f"{', '.join(names)}. Prepare the optimizer with whole_matrices=False, so that each rank "
                "steps all of its own."
            )

    # Checkpoints

    def _register(self) -> None:
        """Adds it to the objects that are saved with the run, in place of an earlier one of the model."""
        known = self.accelerator._runtime.prepared.local_sgd
        known[:] = [*(each for each in known if each.model is not self.model), self]
        self.accelerator._runtime.observers.prepared()

    def parts(self, index: int) -> list[Part]:
        """Returns the parts of a checkpoint with what differs between ranks.

        Args:
            index: Its position among the objects that are saved.
        """
        return [RankState(index, self)]

    def saved_weights(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the weights that a checkpoint has for the model, which are those of rank 0.

        Called on all ranks.
        """
        return state

    def nbytes(self) -> int:
        """Returns the bytes in a checkpoint that all ranks have in common."""
        return 0
