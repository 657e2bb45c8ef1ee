"""Comparison of the weights that several ranks have, after the first steps of an optimizer.

The weights of ranks diverge without an error if gradients are not averaged: after a forward through the
module before `prepare`, with gradients from `torch.autograd.grad`, or with parameters of a model that was not
prepared. So prepared optimizers compare a digest of their parameters after steps 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate import torch_private
from accelerate.base import StateError, listed
from accelerate.logging import get_logger
from accelerate.ops import current_transport, flight_recorder, is_dtensor, local_tensor
from accelerate.strategies.tolerances import CHECK_REPLICAS

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.strategies.base import Strategy

logger = get_logger(__name__)

PURPOSE = "comparison of replicas"
"""Name of the comparison in the flight recorder and in hang reports."""

_SAMPLES, _SAMPLE_SIZE = 3, 1 << 16  # parameters, and elements of each, that are compared as numbers
_GRADIENT_ROUNDING = 0.01  # relative difference of gradients that rounding does not exceed
_WEIGHT_ROUNDING = 1e-3  # the same for weights, over all steps of a run
_WORD = 8  # bytes
_requires_grad = attrgetter("requires_grad")

Ranks = tuple[int, ...]
ALL_RANKS: Ranks = ()
Key = tuple[Ranks, str]
"""Ranks that have the same elements of a parameter, and its name."""


# Digests


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns a 0-d integer that depends on all bits of the elements of a tensor on this rank.

    All hardware computes the same number.
    """
    flat: Tensor = local_tensor(tensor).detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    length = flat.numel() // _WORD * _WORD
    total = flat[:length].view(torch.int64).sum()  # wraps around, so the order of the sum has no effect
    return total if length == flat.numel() else total * 31 + flat[length:].sum()


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the digests of tensors, which are read from each device at once."""
    values = [digest(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.device, []).append(index)
    found: dict[int, int] = {}
    for indices in by_device.values():
        numbers = torch.stack([values[index] for index in indices]).tolist()
        found.update(zip(indices, numbers, strict=True))
    return [found[index] for index in range(len(values))]


# Comparison


def watch_replicas(optimizer: AcceleratedOptimizer, check: ReplicaCheck) -> None:
    """Makes an optimizer compare its parameters, unless the program has switched that off."""
    if optimizer.gradient_state.plugin_kwargs.get(CHECK_REPLICAS, True):
        optimizer.observers = (*optimizer.observers, check)


class ReplicaCheck:
    """Observer of an optimizer that compares its parameters over the ranks which have the same ones.

    It compares after steps 1, 2, 4, 8 and so on, and after the first step that trains further parameters,
    unless ranks have different ones, as in a pipeline. Only parameters are compared whose gradients are
    averaged over these ranks. Ranks that compute the same gradients from the same batch, as with tensor
    parallelism, may round them differently.

    Args:
        ranks_of_whole: Ranks that have the same elements of a parameter that is not sharded, or None if its
            gradients are not averaged.
    """

    def __init__(self, strategy: Strategy, ranks_of_whole: Ranks | None) -> None:
        self._strategy = ref(strategy)  # it has the optimizers, which have this object
        self._ranks_of_whole = ranks_of_whole
        self._steps, self._due = 0, 1
        self._num_groups = 0
        self._frozen: list[Tensor] = []

    @property
    def strategy(self) -> Any:
        """Strategy of the run, which ends with its `Accelerator`."""
        return self._strategy()

    # What subclasses know of their wrappers

    def is_joining(self) -> bool:
        """Returns whether ranks may take different numbers of steps now."""
        return False

    def trains_apart(self, optimizer: AcceleratedOptimizer) -> bool:
        """Returns whether the program has requested that ranks step without averages of gradients."""
        return False

    def excluded(self) -> Collection[int]:
        """Returns the ids of parameters that the program averages itself, or not at all."""
        return ()

    def cause(self, parameter: Tensor) -> str | None:
        """Returns why the gradient of a parameter of a prepared model was not averaged, with the fix."""
        return None

    # Observer

    def before_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Counts the step, and compares after one in which a gradient scaler may have skipped the update."""
        if self._is_off(optimizer):
            return
        if optimizer.scaler is not None and self._steps >= self._due:
            self._compare(optimizer)
        self._steps += 1
        if len(optimizer.param_groups) != self._num_groups or (
            self._frozen and any(map(_requires_grad, self._frozen))
        ):
            self._num_groups = len(optimizer.param_groups)
            # Ranks with different parameters cannot detect that others train further ones.
            is_divided = any(layer.divides_models for layer in self.strategy.layers)
            frozen = [] if is_divided else [p for p in optimizer.parameters() if not p.requires_grad]
            self._frozen, self._due = frozen, self._steps

    def after_update(self, optimizer: AcceleratedOptimizer) -> None:
        """Compares after the steps at which a comparison is due."""
        if self._steps < self._due or optimizer.scaler is not None:
            return
        if not self._is_off(optimizer):
            self._compare(optimizer)

    def _is_off(self, optimizer: AcceleratedOptimizer) -> bool:
        """Returns whether ranks may take different steps, or the `Accelerator` has been deleted."""
        is_apart = optimizer.is_joined or bool(optimizer.conditions)
        return is_apart or self.strategy is None or self.is_joining()

    # Comparison

    def _compare(self, optimizer: AcceleratedOptimizer) -> None:
        """Raises an error on all ranks if parameters differ."""
        if self.trains_apart(optimizer):
            return
        self._due = 2 * self._steps
        replicated = self._find_replicated(optimizer)
        with flight_recorder().entry(PURPOSE):
            own: dict[Ranks | str, bytes] = {
                ranks: _short_digest(digests(several)) for ranks, several in replicated.items()
            }
            own.update((option, _short_digest(n)) for option, n in self._options_of(optimizer).items())
            different = _differing(current_transport().gather_object(own))
            for option in different:
                if isinstance(option, str):
                    self._refuse_option(optimizer, option)
            if different:
                self._explain(optimizer, {ranks: replicated.get(ranks, []) for ranks in different})

    def _options_of(self, optimizer: AcceleratedOptimizer) -> dict[str, list[float]]:
        """Returns the learning rates and other floating-point options of groups, if weights do not show them.

        Weights show them if ranks have the same elements. Integers are not compared, because an optimizer may
        count the steps of a group only on ranks that have elements of it.
        """
        found: dict[str, list[float]] = {}
        strategy = self.strategy
        if not strategy.shards_models or any(layer.divides_models for layer in strategy.layers):
            return found
        for group in optimizer.param_groups:
            for option, value in group.items():
                is_number = isinstance(value, float) or (type(value) is Tensor and value.numel() == 1)
                if is_number or option == "lr":
                    found.setdefault(option, []).append(float(value))
        return found

    def _refuse_option(self, optimizer: AcceleratedOptimizer, option: str) -> NoReturn:
        values = map(str, current_transport().gather_object(self._options_of(optimizer).get(option)))
        raise StateError(
            f"Ranks have different values of {option!r} in their parameter groups after step {self._steps} "
            f"of {type(optimizer.optimizer).__name__}: {listed(list(values))}. They were computed "
            "on each rank alone, such as by a schedule that uses the loss of one rank, or by a norm or a sum "
            "over the gradients of its shards. Compute them from values of all ranks: "
            'accelerator.reduce(loss, "mean"), or accelerator.clip_grad_norm_(parameters, float("inf")) for '
            "the norm."
        )

    def _find_replicated(self, optimizer: AcceleratedOptimizer) -> dict[Ranks, list[Tensor]]:
        """Returns the trained parameters that several ranks have, by these ranks."""
        excluded, ranks_of = self.excluded(), _ranks_of_sharded(self.strategy)
        found: dict[Ranks, list[Tensor]] = {}
        for parameter in filter(_requires_grad, optimizer.parameters()):
            ranks = ranks_of.get(id(parameter), None if is_dtensor(parameter) else self._ranks_of_whole)
            is_plain = type(local_tensor(parameter).detach()) is Tensor
            if ranks is not None and is_plain and id(parameter) not in excluded:
                found.setdefault(ranks, []).append(parameter)
        return found

    def _explain(self, optimizer: AcceleratedOptimizer, replicated: Mapping[Ranks, list[Tensor]]) -> None:
        """Raises an error with the names of parameters that differ by more than rounding."""
        names, transport = _names(self.strategy, optimizer), current_transport()
        own = {(ranks, names[id(p)]): p for ranks, several in replicated.items() for p in several}
        numbers = zip(digests(own.values()), own.values(), strict=True)
        sent = {key: (p.numel(), number) for key, (number, p) in zip(own, numbers, strict=True)}
        everyone = transport.gather_object(sent)
        different = _differing(everyone)
        sizes = {key: each[key][0] for each in everyone for key in each}
        chosen = sorted(different, key=lambda key: (sizes[key], key))[:_SAMPLES]
        samples = transport.gather_object({key: _sample(own[key]) for key in chosen if key in own})
        verdicts = {_verdict([each[key] for each in samples if key in each]) for key in chosen}
        which = listed(list(dict.fromkeys(name for _, name in different)))
        kind = type(optimizer.optimizer).__name__
        if verdicts == {ROUNDING}:
            logger.info(f"Ranks round {which} differently in the steps of {kind}.")
            return
        reason = self._reason(own.get(different[0]), are_gradients=GRADIENTS in verdicts)
        raise StateError(
            f"Ranks have different weights after step {self._steps} of {kind}: {which}. {reason} If ranks "
            "are meant to train separately, pass gradient_accumulation_plugin=GradientAccumulationPlugin("
            f"{CHECK_REPLICAS}=False) to Accelerator."
        )

    def _reason(self, parameter: Tensor | None, *, are_gradients: bool) -> str:
        models = [self.strategy.unwrap(model) for model in self.strategy.session.prepared.models]
        known = {id(each) for model in models for each in model.parameters()}
        if parameter is not None and id(parameter) not in known:
            return _NOT_PREPARED
        if not are_gradients:
            return _WEIGHTS_DIFFER
        return (None if parameter is None else self.cause(parameter)) or _GRADIENTS_DIFFER


def _short_digest(numbers: Sequence[float]) -> bytes:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()


GRADIENTS, WEIGHTS, ROUNDING = "gradients", "weights", "rounding"
"""What differs between ranks."""
ADDED = (
    "They did not exist when the model was prepared, so FSDP does not average their gradients. Add modules "
    "and parameters to a model before prepare()."
)
_NOT_PREPARED = (
    "They belong to no prepared model, so their gradients are not averaged. Pass their model to prepare()."
)
_GRADIENTS_DIFFER = (
    "Their gradients were computed or changed on each rank alone: by torch.autograd.grad, an assignment to "
    "`grad`, a change on some ranks only, or another backward pass than accelerator.backward(). Compute them "
    "with accelerator.backward(loss), or average them with "
    'accelerator.reduce(gradient, "mean") before the step.'
)
_WEIGHTS_DIFFER = (
    "Their gradients are equal, so the weights, the states of the optimizer or its learning rates were "
    "changed or loaded on each rank alone, such as by a schedule that uses the loss of one rank. Change and "
    "load them in the same way on all ranks."
)


def _differing(everyone: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """Returns the keys whose values are not equal on all ranks that have them."""
    found: dict[Any, set[Any]] = {}
    for each in everyone:
        for key, value in each.items():
            found.setdefault(key, set()).add(value)
    return [key for key, values in found.items() if len(values) > 1]


def _ranks_of_sharded(strategy: Strategy) -> dict[int, Ranks | None]:
    """Returns the ranks that have the same elements of parameters of sharded models, by their id.

    The value is None if gradients are not averaged over ranks with the same elements.
    """
    found: dict[int, Ranks | None] = {}
    for layer in strategy.layers:
        found.update(layer.ranks_of_parameters())
    for model in strategy.session.prepared.models:
        for parameter, mesh in torch_private.meshes_of_fsdp2(model).items():
            is_hybrid = mesh.ndim == 2 and mesh.size(0) > 1
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(0))) if is_hybrid else None
            found[id(parameter)] = ranks
    return found


def _names(strategy: Strategy, optimizer: AcceleratedOptimizer) -> dict[int, str]:
    """Returns the names of parameters by id, or their positions for parameters of no prepared model."""
    names = {
        id(parameter): f"parameter {index} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    }
    models = [strategy.unwrap(model, keep_compiled=False) for model in strategy.session.prepared.models]
    stepped = [{id(p): name for name, p in m.named_parameters() if id(p) in names} for m in models]
    several = sum(map(bool, stepped)) > 1
    for index, own in enumerate(stepped):
        names.update((key, f"model_{index}.{name}" if several else name) for key, name in own.items())
    return names


@torch.no_grad()
def _sample(parameter: Tensor) -> tuple[Tensor, float, Tensor | None]:
    """Returns elements of a parameter in float32 on the CPU, the precision of its dtype, and its gradient."""
    local, gradient = local_tensor(parameter).detach(), parameter.grad
    if gradient is not None:
        gradient = _first_elements(local_tensor(gradient))
    return _first_elements(local), torch.finfo(local.dtype).eps, gradient


def _first_elements(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1)[:_SAMPLE_SIZE].float().cpu().nan_to_num()


def _verdict(samples: Sequence[tuple[Tensor, float, Tensor | None]]) -> str:
    """Returns what differs between the samples of a parameter on several ranks."""
    weights, gradients = [weight for weight, _, _ in samples], [gradient for *_, gradient in samples]
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) not in (0, len(samples)) or _spread(present) > _GRADIENT_ROUNDING:
        return GRADIENTS
    return WEIGHTS if _spread(weights) > max(_WEIGHT_ROUNDING, 4 * samples[0][1]) else ROUNDING


def _spread(tensors: Sequence[Tensor]) -> float:
    """Returns the largest difference of tensors from the first one, relative to the largest element."""
    if len({tensor.shape for tensor in tensors}) > 1:
        return float("inf")
    largest = max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
    differences = [float((tensor - tensors[0]).abs().max()) for tensor in tensors if tensor.numel()]
    return max(differences) / largest if largest else 0.0
