"""Gradients and buffers of a step that replica groups take together, and that they may have to repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from accelerate import strategies, torch_private
from accelerate.base import StateError
from accelerate.held_gradients import differs
from accelerate.recovery.membership import Members, Membership

BUCKET_BYTES = 32 * 2**20
"""Bytes of gradients in one all-reduce over the members."""
OPTIONS = ("lr", "momentum", "betas", "weight_decay")
"""Options of optimizers that loops change, and optimizers do not compute from gradients."""
NUM_DIGITS = 6
"""Numbers of 4 bits in the digest of the options of the optimizers, whose sums of squares are exact."""
CHANGED_GRADIENTS = (
    "Gradients were changed or set to zero after accelerator.backward(loss), and another backward pass of "
    "the same step adds to them. After a failure, a replica group computes several batches in one step, so "
    "the result would depend on failures. Change gradients after the last backward pass of a step, if "
    "accelerator.sync_gradients is True, as accelerator.clip_grad_norm_ does, or leave --replicas out."
)


class _Gradient(NamedTuple):
    """Gradient of a parameter after a backward pass."""

    parameter: nn.Parameter
    gradient: torch.Tensor | None
    version: int
    copy: torch.Tensor | None

    @classmethod
    def of(cls, parameter: nn.Parameter, *, is_copied: bool) -> _Gradient:
        gradient = parameter.grad
        [version] = torch_private.in_place_versions([gradient])
        copy = gradient.clone() if is_copied and gradient is not None else None
        return cls(parameter, gradient, version, copy)

    def is_changed(self) -> bool:
        return differs(self.parameter.grad, self.gradient, self.version)


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
        self._gradients: list[_Gradient] = []  # after the last backward pass
        self._undoes_changes = False  # of these gradients by the loop
        self._to_check: set[nn.Parameter] = set()  # parameters whose sums the loop has changed
        self._states: list[strategies.ModuleState] = []  # of the models, at the beginning of the step
        self._kept: list[strategies.ModuleState] = []  # before a micro-batch that must not change the models
        self._changed: list[strategies.SavedBuffer] = []  # buffers that the step has changed
        self._num_flags = num_flags
        size = num_flags + 1 + 2 * NUM_DIGITS
        self._flags = nn.Parameter(torch.zeros(size, dtype=torch.float32, device=strategy.context.device))

    @property
    def counts(self) -> list[float]:
        """Returns the sums of the flags over the members, after a backward pass."""
        assert self._flags.grad is not None
        return [float(count) for count in self._flags.grad.tolist()[: self._num_flags]]

    def weights(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers of the models."""
        models = self._prepared.models
        return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]

    def begin(self) -> None:
        """Keeps the state of the models, to which `restore` returns."""
        self._states, self._kept, self._gradients = self._model_states(), [], []

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

    def begin_backward(self) -> None:
        """Takes the sums of earlier backward passes of this step, which are not to be added up again.

        Raises:
            StateError: The loop has changed gradients before the last micro-batch of this replica group.
        """
        changed, self._gradients = [each for each in self._gradients if each.is_changed()], []
        if self._has_summed:
            self._to_check.update(each.parameter for each in changed)
            self._take_sums()
        elif changed and not self._undoes_changes:
            raise StateError(CHANGED_GRADIENTS)
        else:
            for each in changed:
                each.parameter.grad = each.copy

    def keep_gradients(self, *, undoes_changes: bool) -> None:
        """Keeps the gradients after a backward pass, and their versions.

        Args:
            undoes_changes: Whether the next backward pass begins with these gradients if the loop changes
                them, because it has one micro-batch in each step without a failure.
        """
        self._undoes_changes = undoes_changes
        self._gradients = [_Gradient.of(parameter, is_copied=undoes_changes) for parameter in self._trained()]

    def _take_sums(self) -> None:
        for parameter in self._trained():
            if (earlier := parameter.grad) is not None:
                # DistributedDataParallel writes the next gradients into the memory of its own views.
                self._sums.append((parameter, earlier.clone() if torch_private.is_view(earlier) else earlier))
                parameter.grad = None

    def add_up(self, membership: Membership, flags: list[bool]) -> None:
        """Adds up the gradients and the flags of all members."""
        self._changed = [saved for state in self._states for saved in state.changed_buffers()]
        digits = list(self._digest_options())
        squares = [digit**2 for digit in digits]
        self._flags.grad = self._flags.new_tensor([*flags, len(self._changed), *digits, *squares])
        parameters = [*self._trained(), self._flags]
        if any(parameter.grad is not None for parameter in self._to_check):
            raise StateError(CHANGED_GRADIENTS)
        strategies.sum_gradients(parameters, membership.sum, bucket_bytes=BUCKET_BYTES)
        self._has_summed = True
        for parameter, earlier in self._sums:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._sums, self._to_check = [], set()

    def _digest_options(self) -> Iterator[int]:
        """Yields the digits of a digest of the options of all optimizers that loops change."""
        options = [
            [_plain(group.get(name)) for group in optimizer.param_groups for name in OPTIONS]
            for optimizer in self._prepared.optimizers
        ]
        for byte in hashlib.blake2b(repr(options).encode(), digest_size=NUM_DIGITS // 2).digest():
            yield from divmod(byte, 16)

    def check_options(self, members: Members) -> None:
        """Raises an error if members have different options of optimizers, after their sums are known."""
        assert self._flags.grad is not None
        sums = self._flags.grad.tolist()[self._num_flags + 1 :]
        pairs = zip(sums[:NUM_DIGITS], sums[NUM_DIGITS:], strict=True)
        if any(total**2 != members.size * squares for total, squares in pairs):
            raise StateError(
                "Replica groups have different learning rates or other options of their optimizers in one "
                "step, so their weights would differ. A group that joins receives optimizers, schedulers and "
                "registered objects, but no variables from which a loop computes such options. Use a "
                "scheduler of `prepare`, or keep the variables in an object with `state_dict` that "
                "accelerator.register_for_checkpointing knows."
            )

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
        self.check_options(members)
        changed = [saved.module.get_buffer(saved.name) for saved in self._changed]
        if self._flags.grad[self._num_flags].item() != len(changed) * members.size:
            raise StateError(
                "Replica groups have changed different buffers of the models in one step, and cannot share "
                "them. Change the same buffers in the forward of each batch."
            )
        if changed:
            membership.send_from_first(members, changed)


def _plain(value: object) -> object:
    """Returns an option of an optimizer, with numbers in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value
