"""Gradients that an optimizer has accumulated in a window of several micro-batches.

A window is the micro-batches of one optimizer step. `Accumulation` creates these objects for windows of
several micro-batches, and a prepared optimizer asks its object in `zero_grad` and `step`. The body of a loop
runs once for each micro-batch, so its `zero_grad` and `step` are called in each of them. Gradients that a
micro-batch has contributed by its `step` are kept until the step at the end of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, is_
from typing import NoReturn

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import StateError
from accelerate.logging import get_logger
from accelerate.ops import local_tensor

logger = get_logger(__name__)
_gradient_of = attrgetter("grad")  # `map` with it runs no bytecode for each parameter


class HeldGradients:
    """Gradients of an optimizer in an unfinished window.

    Args:
        replicas: Number of ranks whose gradients are averaged in the last micro-batch.
        take_unreduced: Takes gradients of parameters that are not in their `grad` yet (FSDP 2).
        set_again: Sets gradients that were removed from parameters, also those of another shape (FSDP 1).

    Attributes:
        rescale: Rescales the gradients of a window whose last micro-batch has had no backward pass.
    """

    rescale: Callable[[], None] | None = None

    def __init__(
        self,
        replicas: int,
        take_unreduced: Callable[[list[Tensor]], torch_private.TakenGradients],
        set_again: Callable[[list[tuple[Tensor, Tensor]]], None],
    ) -> None:
        self._replicas, self._take_unreduced, self._set_again = replicas, take_unreduced, set_again
        self._parameters: list[Tensor] = []
        self._held: list[Tensor | None] = []  # gradients of the window
        self._seen: list[Tensor | None] = []  # gradients in `grad` when no backward pass had changed them
        self._versions: list[int] = []  # of those
        self._unreduced: torch_private.TakenGradients | None = None  # while later gradients are kept apart
        self._is_untouched = True  # no backward pass has begun since `_look`
        self._has_contributed = False  # `step` was called in this window
        self._has_stepped = False  # `step` was called in this micro-batch
        self._is_apart = False  # later gradients are not added to those that are held
        self._is_first = self._is_last = False
        self._joins = False  # the next backward pass adds gradients to those that were kept apart
        self._was_kept = False  # `zero_grad` was called after a backward pass of this micro-batch
        self._had_backward = False  # a backward pass of this micro-batch has begun
        self._drops = False  # `zero_grad` was called in the last micro-batch, and no backward pass since then

    @property
    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its gradients of the window, which may not be its `grad`."""
        yield from self._reduced
        if self._unreduced is not None:
            yield from self._unreduced.gradients

    @property
    def _reduced(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((p, held) for p, held in zip(self._parameters, self._held, strict=True) if held is not None)

    def begin(
        self, parameters: Iterable[Tensor], *, is_first: bool, is_last: bool, is_alone: bool = False
    ) -> None:
        """Begins a micro-batch.

        Args:
            is_first: Whether it is the first one of the window.
            is_alone: Whether no other optimizer takes part in it, so that its first backward pass is for
                these parameters.
        """
        self._set_parameters(list(parameters))
        self._is_first, self._is_last, self._was_kept, self._had_backward = is_first, is_last, False, False
        if is_first:
            if not self.drop_cleared():
                self._warn_of_unused()
            self._held = [None] * len(self._parameters)
            self._is_apart = self._has_contributed = False
            self._unreduced = None
            self._look()
        elif not (self._is_apart or self._has_stepped) and (self._restore() or self._has_new()):
            self._hold()  # no `step` was called in the micro-batch before
        self._has_stepped = self._is_apart
        self._joins = is_alone and self._is_apart

    def drop_cleared(self) -> bool:
        """Drops gradients of a window that has ended without a step, if `zero_grad` was called at its end.

        A loop that catches an exception in the last micro-batch calls it, for example.

        Returns:
            Whether it was called.
        """
        if not self._drops:
            return False
        self._drops = False
        self._take_unreduced(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None
        return True

    def leave(self) -> None:
        """Ends a micro-batch, before one of other models begins whose loss may fill the same gradients."""
        if not self._has_stepped:
            self._restore()
            self._hold()
            self._has_stepped = True

    def begin_backward(self) -> None:
        """Begins a backward pass, whose gradients are added to those that are held.

        After the `step` of a micro-batch the gradients are complete, and those of another loss are kept apart
        until `zero_grad` removes them.
        """
        self._had_backward, self._drops = True, False
        if self._joins and not self._is_cleared():  # plain torch adds them, too, without `zero_grad`
            self._join()
            self._look()
            self._has_stepped = False
        self._joins = False
        if self._has_stepped and not self._is_cleared():
            self._set_apart()
            return
        self._put_unreduced(adds=False)
        self._refuse_zeros()
        if self._restore() and not self._has_stepped and self._has_new():
            _refuse_between()  # the caller has removed them after an earlier pass of this micro-batch
        self._has_stepped = self._is_apart = self._is_untouched = False

    def end_backward(self) -> None:
        """Ends a backward pass, whose gradients are held even if `Module.zero_grad` removes them."""
        if self._is_apart:
            return
        if not self._is_first:
            self._held = list(map(_gradient_of, self._parameters))
            return
        entries = zip(self._parameters, self._held, self._seen, self._versions, strict=True)
        self._held = [  # without gradients from before the window
            p.grad if held is not None or differs(p.grad, seen, version) else None
            for p, held, seen, version in entries
        ]

    def zero_grad(self, clear: Callable[[], None]) -> None:
        """Removes the gradients that do not belong to the window.

        Args:
            clear: Clears all gradients, which is called if the window has none yet.
        """
        if self._is_apart:
            self._put_unreduced(adds=False)
            for parameter in self._parameters:
                parameter.grad = None
            self._set_again(list(self._reduced))
            self._look()
        elif not self._has_stepped and self._has_new():
            self._was_kept = True
            if self._is_last:  # the step is left out, and its gradients are dropped
                clear()
                self._held = [None] * len(self._parameters)
            self._look()
        elif not any(held is not None for held in self._held):
            clear()
            self._look()
        self._drops = self._is_last
        self._has_stepped = self._is_apart = self._joins = False

    def contribute(self) -> None:
        """Keeps the gradients of a micro-batch, in the `step` of one that is not the last."""
        self._refuse_kept()
        self._join()
        self._hold()
        self._has_stepped = self._has_contributed = True

    def complete(self) -> None:
        """Adds the gradients that are held, in the `step` of the last micro-batch."""
        if not self._had_backward:
            self._refuse_unreduced()
        self._refuse_kept()
        if self._join() and self._replicas > 1:
            raise StateError(
                "Gradients of a window were removed in its last micro-batch, or belong to a backward pass "
                "after the step of the micro-batch before, and could not be averaged over the ranks. Call "
                "optimizer.zero_grad() before the backward pass, and accelerator.backward(loss) in place of "
                "loss.backward()."
            )
        if self.rescale is not None:
            self.rescale()

    def _set_parameters(self, parameters: list[Tensor]) -> None:
        """Sets the parameters, to which a group may have been added."""
        if len(parameters) != len(self._parameters):
            held = dict(self._reduced)
            seen = zip(self._seen, self._versions, strict=True)
            known = dict(zip(self._parameters, seen, strict=False))
            self._held = [held.get(p) for p in parameters]
            self._seen = [known.get(p, (None, 0))[0] for p in parameters]
            self._versions = [known.get(p, (None, 0))[1] for p in parameters]
        self._parameters = parameters

    def _look(self) -> None:
        self._seen = list(map(_gradient_of, self._parameters))
        self._versions = torch_private.in_place_versions(self._seen)
        self._is_untouched = True

    def _hold(self) -> None:
        self._look()
        self._held = self._seen

    def _set_apart(self) -> None:
        """Takes the gradients that are held out of `grad`, to which a backward pass would add others."""
        if self._is_apart or not any(p.requires_grad for p in self._parameters):
            return
        # DistributedDataParallel writes the next gradients into the memory of its own views.
        self._held = [
            held if held is None or held.shape != p.shape or not torch_private.is_view(held) else held.clone()
            for p, held in zip(self._parameters, self._held, strict=True)
        ]
        for parameter, _ in self._reduced:
            parameter.grad = None
        self._is_apart = True
        self._unreduced = self._take_unreduced(self._parameters)

    def _restore(self) -> bool:
        """Sets the gradients that are held where they were removed, and returns whether one was."""
        if all(map(is_, map(_gradient_of, self._parameters), self._held)):
            return False
        removed = [(p, held) for p, held in self._reduced if p.grad is None and p.requires_grad]
        self._set_again(removed)
        return bool(removed)

    def _join(self) -> bool:
        """Adds the gradients that are held to those of `grad` that lack them, and returns whether any did."""
        if not self._is_apart:
            return self._restore()
        self._is_apart = False
        has_joined = bool(self._unreduced)
        with torch.no_grad():
            self._put_unreduced(adds=True)
            reduced = list(self._reduced)
            both = [(p, held, p.grad) for p, held in reduced if p.grad is not None]
            if any(later.shape != held.shape for _, held, later in both):
                _refuse_mixed()
            self._set_again([(p, held) for p, held in reduced if p.grad is None])
            for parameter, held, later in both:
                parameter.grad = held + later
        return has_joined or bool(reduced)

    def _is_cleared(self) -> bool:
        """Returns whether a caller has removed the gradients that are held."""
        removed = [p.grad is None for p, _ in self._reduced]
        if self._unreduced:
            removed.append(not self._unreduced.has_later and all(p.grad is None for p in self._parameters))
        return bool(removed) and all(removed)

    def _has_new(self) -> bool:
        """Returns whether gradients have been added or changed since `_look`."""
        grads = list(map(_gradient_of, self._parameters))
        if all(map(is_, grads, self._seen)) and torch_private.in_place_versions(grads) == self._versions:
            return False
        entries = zip(self._parameters, self._seen, self._versions, strict=True)
        return any(p.grad is not None and differs(p.grad, seen, version) for p, seen, version in entries)

    def _warn_of_unused(self) -> None:
        if self._has_contributed:
            logger.warning_once(
                "step() of an optimizer was called in micro-batches of a window, and not in its last one, so "
                "their gradients were not used. Call it in each micro-batch, or count windows of each model "
                "with an accumulate(model) of its own."
            )

    def _refuse_unreduced(self) -> None:
        """Raises if FSDP has not reduced gradients, which it does in the last backward pass of a window."""
        is_whole = any(p.grad is not None and p.grad.shape != p.shape for p in self._parameters)  # FSDP 1
        if is_whole or self._take_unreduced(self._parameters):
            raise StateError(
                "The last micro-batch of a window had no backward pass, in which FSDP reduces the gradients "
                "of the window. Call accelerator.backward(loss) in each micro-batch, such as with a loss of "
                "`0 * outputs.sum()`, or skip the batch before accelerator.accumulate(model)."
            )

    def _refuse_kept(self) -> None:
        if self._was_kept and self._has_new():
            _refuse_between()

    def _refuse_zeros(self) -> None:
        """Raises if the gradients of the micro-batches before were set to zero in place since `_look`."""
        if not self._is_untouched or torch_private.in_place_versions(self._seen) == self._versions:
            return
        entries = zip(self._parameters, self._held, self._seen, self._versions, strict=True)
        changed = [
            held
            for p, held, seen, version in entries
            if held is not None and p.grad is held is seen and differs(p.grad, seen, version)
        ]
        if changed and not any(bool(gradient.any()) for gradient in changed):
            raise StateError(
                "The gradients of a window were set to zero before its last micro-batch, by "
                "model.zero_grad(set_to_none=False) or in place. Call optimizer.zero_grad(), which keeps "
                "those of the micro-batches before."
            )

    def _put_unreduced(self, *, adds: bool) -> None:
        """Puts gradients back that FSDP has not reduced, with those that were added since then or without."""
        if self._unreduced is None:
            return
        if self._unreduced.is_mixed:
            raise StateError(
                "A backward pass after optimizer.step() has added gradients of another loss to those of the "
                "window, and FSDP keeps their sum where zero_grad() cannot separate them. Freeze the "
                "parameters of this optimizer in that pass with requires_grad_(False), or use "
                "GradientAccumulationPlugin(num_steps=..., sync_each_batch=False)."
            )
        self._unreduced.put_back(adds=adds)
        self._unreduced = None


def differs(gradient: Tensor | None, before: Tensor | None, version: int) -> bool:
    """Returns whether a gradient is not the one before, which had a version then."""
    if gradient is before:
        return gradient is not None and torch_private.in_place_version(gradient) != version
    if gradient is None or before is None or gradient.is_sparse or before.is_sparse:
        return True
    # A forward of DistributedDataParallel may move gradients into other buckets.
    return not torch.equal(local_tensor(gradient), local_tensor(before))


def _refuse_mixed() -> NoReturn:
    raise StateError(
        "A backward pass after optimizer.step() has computed gradients of another loss, which FSDP 1 has "
        "reduced, and those of the window are not reduced yet. Call optimizer.zero_grad() before the next "
        "backward pass of this optimizer, or freeze its parameters in that pass with requires_grad_(False)."
    )


def _refuse_between() -> NoReturn:
    raise StateError(
        "zero_grad() was called between two backward passes of one micro-batch, of which plain torch drops "
        "the first. In a window of several micro-batches its gradients cannot be separated from those of the "
        "micro-batches before. Detach the tensors that connect the first loss to these parameters "
        "(`fakes.detach()`), or call zero_grad() before the first backward pass."
    )
