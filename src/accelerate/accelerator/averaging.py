"""Exponential moving averages of the weights of prepared models.

`Accelerator.average` returns a `WeightAverage`, which prepared optimizers update after each of their steps.
The averages have the layout of the tensors that optimizers step: shards, flat parameters or whole tensors.
`average_files.py` saves and loads them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from accelerate import strategies, torch_private
from accelerate.accelerator.runtime import Runtime
from accelerate.base import PreparationError, StateError, listed, wrong_value
from accelerate.checkpointing import LocalShards, Shard, to_local_shards
from accelerate.ops import current_transport, is_dtensor, run_on_all_ranks
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import services

Decay = float | Callable[[int], float]
"""Decay of an average, or a function that returns it for the number of a step."""


@dataclass(frozen=True)
class Stepped:
    """Parameters of one model that one optimizer steps, with the averages of their local tensors.

    Attributes:
        averages: Their averages, in the same order.
        num_stepped: Number of all parameters of the optimizer.
    """

    parameters: list[Tensor]
    averages: list[Tensor]
    num_stepped: int

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over the local tensors and their averages."""
        return zip(map(_local, self.parameters), self.averages, strict=True)


class WeightAverage:
    """Exponential moving average of the trainable weights of a prepared model.

    Created by `Accelerator.average`. It averages the parameters that prepared optimizers step, each after the
    steps of its optimizer. Other parameters and all buffers are those of the model, also in `applied` and in
    saved models.

    Attributes:
        model: The prepared model.
        is_applied: Whether the model has the averages in place of its weights, inside of `applied`.
        aliases: All names of each averaged weight by its first name, without prefixes of wrappers, on all
            ranks.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        decay: Decay,
        every: int,
        start: int,
        device: torch.device | str | None,
    ) -> None:
        _check_options(decay, every, start)
        self.model = runtime.find_prepared(model)
        runtime.strategy.state.check_averages(self.model)
        self.is_applied = False
        self._runtime = runtime
        self._decay, self._every, self._start = decay, every, start
        self._device = _checked_device(device)
        self._stepped: dict[AcceleratedOptimizer, Stepped] = {}
        self.aliases: dict[str, list[str]] = {}
        self._begin()
        for optimizer in self._stepped:
            optimizer.observers = (*optimizer.observers, self)
        runtime.prepared.averages.append(self)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Replaces the weights of the model by the averages inside the block, as a context manager.

        Called on all ranks that compute with the model. No rank communicates. The weights are kept on the
        device of the averages, and are exactly as before after the block and after an exception in it. A
        model with weights of a lower precision has the rounded averages.

        Yields:
            The prepared model.

        Raises:
            StateError: Averages of this model are applied already, or its parameters are gathered.
        """
        if any(other.is_applied and other.model is self.model for other in self._runtime.prepared.averages):
            raise StateError(
                f"The averages of {type(self.model).__name__} are applied already: applied() blocks of one "
                "model cannot be nested. Leave the outer block first."
            )
        self._free_gathered()
        for optimizer, stepped in self._stepped.items():
            if len(self._weights_of(optimizer)) < len(stepped.parameters):
                self._refuse_gathered()
        self.refresh()
        kept: list[tuple[Tensor, Tensor]] = []
        parameters = [each for stepped in self._stepped.values() for each in stepped.parameters]
        versions, version = torch_private.in_place_versions(parameters), _version_of_averages()
        self.is_applied = True
        try:
            self._put_averages(kept)
            # Autograd refuses the backward pass of a loss of the weights inside, and of the averages outside.
            torch_private.set_in_place_versions(parameters, [version] * len(parameters))
            yield self.model
        except RuntimeError as error:
            if f"is at version {version};" not in str(error):
                raise
            raise StateError(
                f"backward() inside of applied() has used the averages of {type(self.model).__name__} for a "
                "loss that was computed with its weights. Call backward() before the block or after it."
            ) from error
        finally:
            _restore(kept)
            torch_private.set_in_place_versions(parameters, versions)
            self.is_applied = False
            self._free_gathered()

    def remove(self) -> None:
        """Ends the average, which optimizers do not update and checkpoints do not have from now on.

        Called on all ranks.

        Raises:
            StateError: The model has the averages, inside of `applied`.
        """
        if self.is_applied:
            raise StateError("remove() inside of applied(): leave the block first.")
        if self in self._runtime.prepared.averages:
            self._runtime.prepared.averages.remove(self)
        for optimizer in self._stepped:
            optimizer.observers = tuple(each for each in optimizer.observers if each is not self)

    # Steps, called by optimizers

    def before_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Raises an error for a step that would change the averages, or parameters that have none."""
        if self.is_applied:
            raise StateError(
                f"optimizer.step() inside of applied() would train the averages of "
                f"{type(self.model).__name__}. Leave the block before the step."
            )
        if len(list(optimizer.parameters())) != self._stepped[optimizer].num_stepped:
            raise StateError(
                f"{type(optimizer.optimizer).__name__} steps other parameters than those that were averaged. "
                "Call remove() of the average, and accelerator.average() again after add_param_group()."
            )

    @torch.no_grad()
    def after_update(self, optimizer: AcceleratedOptimizer) -> None:
        """Updates the averages of the parameters that an optimizer has changed."""
        step, stepped = optimizer.num_updates, self._stepped[optimizer]
        if step < self._start:
            if step == self._start - 1:
                _copy(stepped)
        elif (step - self._start) % self._every == 0:
            decay = self._decay
            if not isinstance(decay, (int, float)):
                decay = decay(step)
                _check_decay("decay(step)", decay)
            _update(stepped, 1 - decay)

    # Values

    @property
    def holds_whole(self) -> bool:
        """True if the averages on each rank are those of whole weights."""
        return self._runtime.strategy.holds_whole_models

    def refresh(self) -> None:
        """Copies the weights of optimizers that have not reached the first step that is averaged."""
        for optimizer, stepped in self._stepped.items():
            if optimizer.num_updates < self._start:
                _copy(stepped)

    def tensors(self) -> list[Tensor]:
        """Returns the averages on this rank, in the order of optimizers and their parameters."""
        return [average for stepped in self._stepped.values() for average in stepped.averages]

    def shards(self) -> dict[str, LocalShards]:
        """Returns the averages on this rank as shards of whole weights, by all names of the weights."""
        self._free_gathered()
        average_of = _finder(pair for stepped in self._stepped.values() for pair in stepped.pairs())
        found: dict[str, LocalShards] = {}
        runtime = self._runtime
        state = runtime.strategy.state.model_shards(self.model).state()
        for position, (path, value) in enumerate(state.items()):
            local = to_local_shards(value, position, runtime.state.process_index)
            if not isinstance(local, LocalShards):
                continue
            averages = [average_of(shard.tensor) for shard in local.shards]
            if own := [average for average in averages if average is not None]:
                offsets = [shard.offsets for shard in local.shards]
                shards = tuple(Shard(*each) for each in zip(offsets, own, strict=True))
                found[str(path[1])] = LocalShards(local.shape, own[0].dtype, shards, local.owned)
        return found

    def nbytes(self, *, is_sharded: bool) -> int:
        """Returns the bytes of the averages, or of those on this rank."""
        if is_sharded:
            return sum(tensor.nbytes for tensor in self.tensors())
        shards = self.shards()
        whole = (shards[name] for name in self.aliases if name in shards)
        return sum(prod(local.shape) * local.dtype.itemsize for local in whole)

    def check_saved(self) -> None:
        """Raises an error if the model has the averages, which a checkpoint would save as its weights."""
        if self.is_applied:
            raise StateError(
                f"The averages of {type(self.model).__name__} are applied: a checkpoint would mix them with "
                "its weights. Save and load the state of the run outside of applied()."
            )

    # Parts

    def _begin(self) -> None:
        """Copies the weights, and gathers the names and errors of all ranks.

        Called on all ranks.
        """

        def begin() -> list[tuple[str, str]]:
            self._free_gathered()
            self._stepped = self._take()
            return self._names()

        names = run_on_all_ranks(begin, PreparationError)
        gathered = current_transport().gather_object(names)
        for first, name in chain.from_iterable(gathered):
            known = self.aliases.setdefault(first, [])
            if name not in known:
                known.append(name)

    def _take(self) -> dict[AcceleratedOptimizer, Stepped]:
        """Returns a copy of the weights of each optimizer of the model."""
        found: dict[AcceleratedOptimizer, Stepped] = {}
        seen: set[int] = set()
        for optimizer in self._runtime.prepared.optimizers:
            own = [p for p in self._weights_of(optimizer) if id(p) not in seen]
            seen.update(map(id, own))
            if own:
                found[optimizer] = Stepped(
                    own, [self._copy_of(_local(p)) for p in own], len(list(optimizer.parameters()))
                )
        name = type(self.model).__name__
        inner = self._runtime.strategy.unwrap(self.model, keep_compiled=False)
        trained = {n: p for n, p in strategies.dtensors.named_parameters(inner).items() if p.requires_grad}
        if left := [n for n, p in trained.items() if id(p) not in seen and _local(p).numel()]:
            raise PreparationError(
                f"No prepared optimizer steps {listed(left)} of {name}. Call accelerator.average() after "
                "prepare() of all optimizers, or freeze these parameters (requires_grad_(False))."
            )
        return found

    @torch.no_grad()
    def _copy_of(self, local: Tensor) -> Tensor:
        """Returns a copy of a tensor, in float32 if its precision is lower."""
        if (
            type(local) is not Tensor
            or local.is_meta
            or not (local.is_floating_point() or local.is_complex())
        ):
            raise PreparationError(
                f"A trained parameter of {type(self.model).__name__} is a {type(local).__name__} "
                f"({local.dtype}, {local.device}), which cannot be averaged."
            )
        dtype = torch.promote_types(local.dtype, torch.float32)
        device = local.device if self._device is None else self._device
        return torch.empty_like(local, dtype=dtype, device=device).copy_(local)

    def _weights_of(self, optimizer: AcceleratedOptimizer) -> list[Tensor]:
        """Returns the trainable weights of the model on this rank that an optimizer steps."""
        weights = self._runtime.strategy.state.stepped_weights(optimizer, self.model)
        return [weight for weight in weights if weight.requires_grad and _local(weight).numel()]

    def _names(self) -> list[tuple[str, str]]:
        """Returns the first name and each name of the averaged weights on this rank."""
        first: dict[tuple[Any, ...], str] = {}
        names: list[tuple[str, str]] = []
        for name, local in self.shards().items():
            memory = tuple((s.offsets, s.tensor.data_ptr(), s.tensor.device) for s in local.shards)
            names.append((first.setdefault(memory, name), name))
        return names

    def _free_gathered(self) -> None:
        """Frees parameters that a forward has left gathered, so that the next one gathers new values."""
        if self._runtime.strategy.holds_whole_models:
            return
        for _, flat in torch_private.flat_units(self.model):
            if flat.is_summoned:
                self._refuse_gathered()
            flat.reshard()
        for unit in strategies.dtensors.units_of(self.model):
            unit.reshard()

    def _refuse_gathered(self) -> NoReturn:
        raise StateError(
            f"The parameters of {type(self.model).__name__} are gathered by unsharded() or "
            "summon_full_params(), inside of which averages cannot be applied. Enter applied() first: "
            "`with average.applied(), accelerator.unsharded(model): ...`."
        )

    @torch.no_grad()
    def _put_averages(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        """Copies the averages into the model, and adds each local tensor and its values before to `kept`."""
        torch.clear_autocast_cache()  # it holds casts of the weights
        for stepped in self._stepped.values():
            for local, average in stepped.pairs():
                kept.append((local, local.detach().to(average.device, copy=True)))
                local.copy_(average)


def _version_of_averages() -> int:
    """Returns a number of changes in place that no weights and no other averages of a process have."""
    return 2**30 + services.next_number("averages")


@torch.no_grad()
def _restore(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    torch.clear_autocast_cache()
    for local, before in kept:
        local.copy_(before)


@torch.no_grad()
def _copy(stepped: Stepped) -> None:
    for local, average in stepped.pairs():
        average.copy_(local)


def _update(stepped: Stepped, weight: float) -> None:
    """Moves averages towards local tensors by a part of their difference, without gradients."""
    together: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for local, average in stepped.pairs():
        if (local.device, local.dtype) == (average.device, average.dtype):
            averages, locals_ = together.setdefault((local.device, local.dtype), ([], []))
            averages.append(average)
            locals_.append(local)
        else:  # one by one, which needs the memory of one tensor
            average.lerp_(local.to(average.device, average.dtype), weight)
    for averages, locals_ in together.values():
        torch._foreach_lerp_(averages, locals_, weight)


def _local(parameter: Any) -> Tensor:
    """Returns the tensor of a parameter that is on this rank, which shares its memory."""
    local: Tensor = parameter.detach().to_local() if is_dtensor(parameter) else parameter.data
    return local


def _finder(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor | None]:
    """Returns a function that finds the average of a view of a local tensor by its memory, or None."""
    ordered = sorted(pairs, key=lambda pair: pair[0].data_ptr())
    starts = [local.data_ptr() for local, _ in ordered]

    def average_of(view: Tensor) -> Tensor | None:
        if type(view) is not Tensor or view.layout != torch.strided or not view.numel():
            return None  # such as quantized weights, which are frozen and may have no address
        index = bisect_right(starts, view.data_ptr()) - 1
        if index < 0:
            return None
        local, average = ordered[index]
        if local.device != view.device or local.dtype != view.dtype:
            return None
        if local.shape == view.shape and local.data_ptr() == view.data_ptr():
            return average
        first = (view.data_ptr() - local.data_ptr()) // local.element_size()
        if first + view.numel() > local.numel():
            return None
        return average.view(-1)[first : first + view.numel()].view(view.shape)

    return average_of


def _check_options(decay: Decay, every: int, start: int) -> None:
    if not callable(decay):
        _check_decay("decay", decay)
    for name, value, least in (("every", every, 1), ("start", start, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise wrong_value(name, value, f"it is not an integer of at least {least}", "Pass one")


def _check_decay(name: str, decay: Any) -> None:
    is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        reason = "the average keeps this part of its value in each update"
        raise wrong_value(name, decay, reason, "Pass a number of at least 0 and less than 1, such as 0.999")


def _checked_device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason, fix = "it is not a device of torch", 'Pass "cpu", or None for the device of the weights'
        raise wrong_value("device", device, reason, fix) from error
