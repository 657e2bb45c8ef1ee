"""Gradients that an optimizer has accumulated in a window of several micro-batches.

A window is the micro-batches of one optimizer step. `Accumulation` creates these objects for windows of
several micro-batches, and a prepared optimizer asks its object in `zero_grad` and `step`. The body of a loop
runs once for each micro-batch, so its `zero_grad` and `step` are called in each of them. Gradients that a
micro-batch has contributed by its `step` are kept until the step at the end of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import StateError
from accelerate.logging import get_logger
from accelerate.ops import local_tensor

logger = get_logger(__name__)


class HeldGradients:
    """Gradients of an optimizer in an unfinished window.

    Args:
        replicas: Number of ranks whose gradients are averaged in the last micro-batch.
        find_unreduced: Returns gradients of the parameters that are not in their `grad` yet (FSDP 2).
    """

    def __init__(self, replicas: int, find_unreduced: Callable[[], list[Tensor]]) -> None:
        self._replicas, self._find_unreduced = replicas, find_unreduced
        self._held: dict[Tensor, Tensor] = {}
        self._seen: dict[Tensor, tuple[Tensor | None, int]] = {}
        self._unreduced: list[tuple[Tensor, int]] = []
        self._has_contributed = False  # `step` was called in this window
        self._has_stepped = False  # `step` was called in this micro-batch
        self._is_apart = False  # later gradients are not added to those that are held
        self._is_untouched = True  # no backward pass has begun since `_look`
        self._is_last = False
        self._was_kept = False  # `zero_grad` was called after a backward pass of this micro-batch

    @property
    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Gradient of the window by parameter, which may not be the `grad` of the parameter."""
        return self._held

    def begin(self, parameters: Iterable[Tensor], *, is_first: bool, is_last: bool) -> None:
        """Begins a micro-batch.

        Args:
            parameters: Parameters of the optimizer.
            is_first: Whether it is the first one of the window.
            is_last: Whether it is the last one.
        """
        parameters = list(parameters)
        self._was_kept, self._is_last = False, is_last
        if is_first:
            if self._has_contributed:
                logger.warning_once(
                    "step() of an optimizer was called in micro-batches of a window, and not in its last "
                    "one, so their gradients were not used. Call it in each micro-batch, or count windows "
                    "of each model with an accumulate(model) of its own."
                )
            self._held, self._is_apart, self._has_contributed = {}, False, False
        elif not self._is_apart:
            if self._has_stepped:
                self._refuse_zeros()
            self._restore()
            self._hold(parameters)
        self._has_stepped = self._is_apart
        self._look(parameters)

    def begin_backward(self) -> None:
        """Begins a backward pass, whose gradients are added to those that are held.

        After the `step` of a micro-batch the gradients are complete, and those of another loss are kept apart
        until `zero_grad` removes them.
        """
        if not self._has_stepped or self._is_cleared():
            self._refuse_zeros()
            if self._restore() and not self._has_stepped and self._has_changed(self._held):
                _refuse_between()  # the caller has removed them after an earlier pass of this micro-batch
            self._has_stepped = self._is_apart = False
        elif not self._is_apart:
            for parameter, gradient in self._held.items():
                # DistributedDataParallel writes the next gradient into the memory of its own views.
                self._held[parameter] = gradient.clone() if torch_private.is_view(gradient) else gradient
                parameter.grad = None
            self._is_apart = True
            self._unreduced = [(gradient, _version(gradient)) for gradient in self._find_unreduced()]

    def end_backward(self, parameters: Iterable[Tensor]) -> None:
        """Ends a backward pass, whose gradients are kept even if `Module.zero_grad` removes them."""
        if not self._is_apart:  # gradients from before the window are not held
            self._hold(p for p in parameters if p in self._held or self._has_changed([p]))

    def zero_grad(self, parameters: Iterable[Tensor], clear: Callable[[], None]) -> None:
        """Removes the gradients that do not belong to the window.

        Args:
            parameters: Parameters of the optimizer.
            clear: Clears all gradients, which is called if the window has none yet.
        """
        parameters = list(parameters)
        if self._is_apart:
            self._refuse_unreduced()
            for parameter in parameters:
                parameter.grad = self._held.get(parameter)
            self._has_stepped = self._is_apart = False
        elif self._has_stepped:
            self._restore()
            self._has_stepped = False
        elif not self._has_changed(parameters):
            self._restore() if self._held else clear()
        else:
            self._was_kept = True
            if self._is_last:  # the step is left out, and its gradients are dropped
                clear()
                self._held = {}
        self._look(parameters)

    def contribute(self, parameters: Iterable[Tensor]) -> None:
        """Keeps the gradients of a micro-batch, in the `step` of one that is not the last."""
        parameters = list(parameters)
        self._refuse_kept(parameters)
        self._join()
        self._hold(parameters)
        self._look(parameters)
        self._has_stepped = self._has_contributed = True

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Adds the gradients that are held, in the `step` of the last micro-batch."""
        self._refuse_kept(list(parameters))
        if self._join() and self._replicas > 1:
            raise StateError(
                "Gradients of a window were removed in its last micro-batch, or belong to a backward pass "
                "after the step of the micro-batch before, and could not be averaged over the ranks. Call "
                "optimizer.zero_grad() before the backward pass, and accelerator.backward(loss) in place of "
                "loss.backward()."
            )

    def _hold(self, parameters: Iterable[Tensor]) -> None:
        self._held = {p: p.grad for p in parameters if p.grad is not None}

    def _restore(self) -> bool:
        """Sets the gradients that are held where they were removed, and returns whether one was."""
        removed = [p for p in self._held if p.grad is None and p.requires_grad]
        for parameter in removed:
            parameter.grad = self._held[parameter]
        return bool(removed)

    def _join(self) -> bool:
        """Adds the gradients that are held to those of `grad` that lack them, and returns whether any did."""
        if not self._is_apart:
            return self._restore()
        self._is_apart = False
        with torch.no_grad():
            for parameter, gradient in self._held.items():
                later = parameter.grad
                parameter.grad = gradient if later is None else gradient + later
        return bool(self._held)

    def _is_cleared(self) -> bool:
        return bool(self._held) and all(parameter.grad is None for parameter in self._held)

    def _look(self, parameters: Iterable[Tensor]) -> None:
        self._is_untouched = True
        self._seen = {p: (p.grad, _version(p.grad)) for p in parameters}

    def _has_changed(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether a backward pass has added gradients since `_look`."""
        return any(p.grad is not None and _differs(p.grad, *self._seen.get(p, _NONE)) for p in parameters)

    def _refuse_kept(self, parameters: Iterable[Tensor]) -> None:
        if self._was_kept and self._has_changed(parameters):
            _refuse_between()

    def _refuse_zeros(self) -> None:
        """Raises if the gradients of the micro-batches before were set to zero in place since `_look`."""
        if not self._is_untouched:
            return
        self._is_untouched = False
        seen = (self._seen.get(parameter, _NONE) for parameter in self._held)
        changed = [g for g, version in seen if g is not None and _version(g) != version]
        if changed and not any(bool(gradient.any()) for gradient in changed):
            raise StateError(
                "The gradients of a window were set to zero before its last micro-batch, by "
                "model.zero_grad(set_to_none=False) or in place. Call optimizer.zero_grad(), which keeps "
                "those of the micro-batches before."
            )

    def _refuse_unreduced(self) -> None:
        known = {id(gradient): version for gradient, version in self._unreduced}
        own = {id(parameter.grad) for parameter in self._held}
        for gradient in self._find_unreduced():
            if id(gradient) not in own and torch_private.in_place_version(gradient) != known.get(
                id(gradient)
            ):
                _refuse_mixed()


_NONE: tuple[None, int] = (None, 0)


def _differs(gradient: Tensor, before: Tensor | None, version: int) -> bool:
    """Returns whether a gradient is not the one before, which had a version then."""
    if gradient is before or before is None or gradient.is_sparse or before.is_sparse:
        return gradient is not before or _version(gradient) != version
    # A forward of DistributedDataParallel may move gradients into other buckets.
    return not torch.equal(local_tensor(gradient), local_tensor(before))


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else torch_private.in_place_version(local_tensor(gradient))


def _refuse_between() -> NoReturn:
    raise StateError(
        "zero_grad() was called between two backward passes of one micro-batch, of which plain torch drops "
        "the first. In a window of several micro-batches its gradients cannot be separated from those of the "
        "micro-batches before. Detach the tensors that connect the first loss to these parameters "
        "(`fakes.detach()`), or call zero_grad() before the first backward pass."
    )


def _refuse_mixed() -> NoReturn:
    raise StateError(
        "A backward pass after optimizer.step() has added gradients of another loss to those of the window, "
        "and FSDP keeps their sum where zero_grad() cannot separate them. Freeze the parameters of this "
        "optimizer in that pass with requires_grad_(False), or use "
        "GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)."
    )
