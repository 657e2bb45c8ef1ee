"""Gradients and buffers of a step that replica groups take together, and that they may have to repeat."""

from __future__ import annotations

import torch
from torch import nn

from accelerate import strategies, torch_private
from accelerate.base import StateError
from accelerate.recovery.membership import Members, Membership

BUCKET_BYTES = 32 * 2**20
"""Bytes of gradients in one all-reduce over the members."""


class StepState:
    """Gradients of a step, and buffers and attributes of the models at its beginning.

    Args:
        strategy: Strategy of the ranks of this replica group.
        num_flags: Number of requests that are added up with the gradients.
    """

    def __init__(self, strategy: strategies.Strategy, prepared: strategies.Prepared, num_flags: int) -> None:
        self._strategy, self._prepared = strategy, prepared
        self._has_summed = False  # whether a backward pass of this micro-batch has added up gradients
        self._sums: list[tuple[nn.Parameter, torch.Tensor]] = []  # of the earlier ones, during another one
        self._states: list[strategies.ModuleState] = []  # of the models, at the beginning of the step
        self._kept: list[strategies.ModuleState] = []  # before a micro-batch that must not change the models
        self._changed: list[strategies.SavedBuffer] = []  # buffers that the step has changed
        self._flags = nn.Parameter(torch.zeros(num_flags + 1, device=strategy.context.device))

    @property
    def counts(self) -> list[float]:
        """Returns the sums of the flags over the members, after a backward pass."""
        assert self._flags.grad is not None
        return [float(count) for count in self._flags.grad.tolist()[:-1]]

    def weights(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers of the models."""
        models = self._prepared.models
        return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]

    def begin(self) -> None:
        """Keeps the state of the models, to which `restore` returns."""
        self._states, self._kept = self._model_states(), []

    def begin_micro_batch(self, *, is_own: bool) -> None:
        """Begins a micro-batch, and keeps the state of the models if it must not change them."""
        self.restore_kept()
        if not is_own:
            self._kept = self._model_states()
        self._has_summed = False

    def restore_kept(self) -> None:
        """Restores the models after a micro-batch that must not change them."""
        for state in self._kept:
            state.restore_values()
        self._kept = []

    def restore(self) -> None:
        """Restores the models as they were at the beginning of the step."""
        for state in self._states:
            state.restore_values()

    def _model_states(self) -> list[strategies.ModuleState]:
        return [strategies.ModuleState(self._strategy.unwrap(model)) for model in self._prepared.models]

    def _trained(self) -> list[nn.Parameter]:
        models = self._prepared.models
        return list(dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad))

    def take_sums(self) -> None:
        """Takes the sums of earlier backward passes of this step, which are not to be added up again."""
        if not self._has_summed:
            return
        for parameter in self._trained():
            if (earlier := parameter.grad) is not None:
                # DistributedDataParallel writes the next gradients into the memory of its own views.
                self._sums.append((parameter, earlier.clone() if torch_private.is_view(earlier) else earlier))
                parameter.grad = None

    def add_up(self, membership: Membership, flags: list[bool]) -> None:
        """Adds up the gradients and the flags of all members."""
        self._changed = [saved for state in self._states for saved in state.changed_buffers()]
        self._flags.grad = self._flags.new_tensor([*flags, len(self._changed)])
        parameters = [*self._trained(), self._flags]
        strategies.sum_gradients(parameters, membership.sum, bucket_bytes=BUCKET_BYTES)
        self._has_summed = True
        for parameter, earlier in self._sums:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._sums = []

    def share_buffers(self, membership: Membership, members: Members) -> None:
        """Sends buffers that the step has changed, such as statistics of normalizations, to all members.

        Those of the first member are the ones of its own micro-batches, whoever has ended.
        """
        if self._flags.grad is None:
            raise StateError(
                "optimizer.step() was called without accelerator.backward(loss) in this step, so gradients "
                "of the replica groups are not added up. Call accelerator.backward(loss) in place of "
                "loss.backward()."
            )
        if members.size == 1 or membership.has_failed:
            return
        changed = [saved.module.get_buffer(saved.name) for saved in self._changed]
        if self._flags.grad[-1].item() != len(changed) * members.size:
            raise StateError(
                "Replica groups have changed different buffers of the models in one step, and cannot share "
                "them. Change the same buffers in the forward of each batch."
            )
        if changed:
            membership.send_from_first(members, changed)
