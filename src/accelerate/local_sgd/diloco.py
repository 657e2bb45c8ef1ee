"""DiLoCo, in which an outer optimizer steps global parameters every few steps of separate ranks.

Source: https://arxiv.org/abs/2311.08105, and https://arxiv.org/abs/2501.18512 for fragments and delays
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accelerate.accelerator import Accelerator
from accelerate.base import PreparationError, StateError, wrong_value
from accelerate.checkpointing import Part
from accelerate.local_sgd.base import LocalSGD
from accelerate.local_sgd.fragments import Exchange, Fragment, build_fragments, split_like, views_by_parameter
from accelerate.local_sgd.global_state import GlobalState
from accelerate.ops import MeanGroup, broadcast

OuterOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Function that returns the outer optimizer of the global parameters."""

PURPOSE = "DiLoCo exchange"
"""Name of the exchanges in the flight recorder and in hang reports."""


class DiLoCo(LocalSGD):
    """Context manager that trains with DiLoCo, in which ranks exchange pseudo-gradients every few steps.

    ```python
    diloco = DiLoCo(accelerator, model, local_sgd_steps=30)
    with diloco:
        for batch in loader:
            with accelerator.accumulate(model):
                ...
                optimizer.step()
                diloco.step()
    ```

    Each rank takes `local_sgd_steps` steps of its own optimizer. The difference of the global parameters and
    those of the rank is the pseudo-gradient, whose mean over the ranks an outer optimizer applies to the
    global parameters, with which all ranks continue. At the end of the block the remaining steps are averaged
    without the outer optimizer, and all ranks have equal weights and buffers. It works on one process, too.

    Created on all ranks, after `prepare` of the model and before `load_state`. `save_state` has the global
    parameters as weights of the model, and the state of each rank, so that a run resumes exactly.

    Args:
        accelerator: `Accelerator` that prepared the model.
        model: Prepared model, of which each rank has all parameters.
        local_sgd_steps: Number of steps of the inner optimizer between two exchanges of a parameter.
        enabled: False disables it.
        outer_optimizer: Function that takes the list of global parameters, and returns their optimizer. The
            default is SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
        num_fragments: Number of parts of the model, which are exchanged one after another in each interval.
        delay: Number of steps between the start of an exchange and the use of its result. The exchange
            overlaps these steps.
        mixing: Part of its own weights that a rank keeps when it receives global parameters, at least 0 and
            less than 1. The default is 0.5 with a delay, and 0 without one.
        quantize: "int8" sends pseudo-gradients as int8, with one scale for each 256 numbers.
        device: Device of the global parameters and of the outer optimizer, such as "cpu". None is that of the
            parameters.

    Attributes:
        outer_optimizer: Optimizer of the global parameters, whose learning rate may be changed.
        num_steps: Number of steps of the inner optimizer.
        is_applied: Whether the model has the global parameters in place of its own, inside of `applied`.

    Raises:
        ConfigurationError: An argument is wrong, or the model is not prepared.
        PreparationError: The model is sharded over the ranks, several ranks train on one batch, an engine
            keeps its weights, or the run has replica groups.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int = 30,
        enabled: bool = True,
        *,
        outer_optimizer: OuterOptimizer | None = None,
        num_fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        quantize: Literal["int8"] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        _check_options(local_sgd_steps, num_fragments, delay, mixing, quantize)
        super().__init__(accelerator, model, local_sgd_steps, enabled=False)
        self.delay, self.num_fragments, self.quantize = delay, num_fragments, quantize
        self.mixing = mixing if mixing is not None else 0.5 if delay else 0.0
        self.is_applied = False
        self.fragments: list[Fragment] = []
        self.exchanges: list[Exchange] = []
        self.enabled = enabled
        if enabled:
            self._begin(outer_optimizer or build_outer_optimizer, _checked_device(device))

    def _begin(self, outer_optimizer: OuterOptimizer, device: torch.device | None) -> None:
        """Copies the parameters, and creates the outer optimizer."""
        runtime = self.accelerator._runtime
        self.model = runtime.find_prepared(self.model)
        _check_strategy(self.accelerator, self.model)
        self._refuse_shared_batches(self.accelerator)
        self.parameters = self._trained()
        _check_parameters(self.parameters, self.num_fragments)
        self.fragments = build_fragments(self.parameters, self.num_fragments, self.local_sgd_steps, device)
        views = views_by_parameter(self.fragments)
        self.globals = [views[parameter] for parameter in self.parameters]
        self.outer_optimizer = _build_optimizer(outer_optimizer, self.globals)
        self._group = MeanGroup(PURPOSE, is_separate=self.delay > 0)
        self._register()

    def step(self) -> None:
        """Counts one step of the inner optimizer, and starts and ends the exchanges that are due.

        Called on all ranks after each step of the inner optimizer, also if the step was skipped. Calls in a
        micro-batch in which optimizers do not step have no effect.

        Raises:
            StateError: It is called outside of the block, inside of `applied`, or the model trains other
                parameters than before.
        """
        if not self.accelerator.sync_gradients:
            return
        if not self.enabled:
            self.num_steps += 1
            return
        if self.model_sync_obj is None or self.is_applied:
            place = "inside of applied()" if self.is_applied else "outside of the block"
            raise StateError(f"DiLoCo.step() {place}: call it in the block `with diloco:`, after each step.")
        self.num_steps += 1
        position = (self.num_steps - 1) % self.local_sgd_steps + 1
        for index, fragment in enumerate(self.fragments):
            if fragment.offset == position:
                self.exchanges.append(self._start(index))
        for exchange in list(self.exchanges):
            age = self.num_steps - exchange.started
            if age >= self.delay:
                self._finish(exchange)
            elif 2 * age >= self.delay:
                for mean in exchange.means:
                    mean.advance()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent in exchanges since it was created.

        A collective counts as if it sent nothing twice: an all-reduce of `n` bytes over `size` ranks sends
        `2 * (size - 1) / size * n`, and an all-to-all and an all-gather half of it.
        """
        return self._group.bytes_sent if self.enabled else 0

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Replaces the weights of this rank by the global parameters inside the block, as a context manager.

        Called on all ranks that compute with the model, for an evaluation or `save_model`. No rank
        communicates. The weights of the rank are exactly as before after the block.

        Yields:
            The prepared model.

        Raises:
            StateError: The global parameters are applied already.
        """
        if self.is_applied:
            raise StateError("applied() blocks cannot be nested. Leave the outer block first.")
        buckets = [bucket for fragment in self.fragments for bucket in fragment.buckets]
        kept = [local.clone() for bucket in buckets for local in bucket.locals]
        own = set(map(id, self.parameters)) if self.enabled else set()
        optimizers = [
            optimizer
            for optimizer in self.accelerator._runtime.prepared.optimizers
            if not own.isdisjoint(map(id, optimizer.parameters()))
        ]
        for optimizer in optimizers:
            optimizer.observers = (*optimizer.observers, self)
        self.is_applied = True
        try:
            torch.clear_autocast_cache()  # it holds casts of the weights
            for bucket in buckets:
                bucket.copy_to_model()
            yield self.model
        finally:
            torch.clear_autocast_cache()
            for local, before in zip((x for each in buckets for x in each.locals), kept, strict=True):
                local.copy_(before)
            self.is_applied = False
            for optimizer in optimizers:
                optimizer.observers = tuple(each for each in optimizer.observers if each is not self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises an error for a step inside of `applied`, whose result would be lost at its end."""
        raise StateError(
            f"optimizer.step() inside of applied() would train the global parameters of "
            f"{type(self.model).__name__}, which are replaced at its end. Leave the block before the step."
        )

    # Exchanges

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _start(self, index: int) -> Exchange:
        if list(map(id, self._trained())) != list(map(id, self.parameters)):
            raise StateError(
                f"{type(self.model).__name__} trains other parameters than when DiLoCo was created, so some "
                "have no global values. Create another DiLoCo after a parameter is frozen or unfrozen."
            )
        fragment = self.fragments[index]
        fragment.started = self.num_steps
        as_int8 = self.quantize == "int8"
        means = [self._group.start(bucket.difference(), as_int8=as_int8) for bucket in fragment.buckets]
        return Exchange(index, self.num_steps, means)

    def _finish(self, exchange: Exchange) -> None:
        """Steps the global parameters of a fragment, and mixes them into the model."""
        self.exchanges.remove(exchange)
        buckets = self.fragments[exchange.index].buckets
        for bucket, mean in zip(buckets, exchange.means, strict=True):
            gradients = split_like(mean.wait().to(bucket.flat.device), bucket.views)
            for view, gradient in zip(bucket.views, gradients, strict=True):
                view.grad = gradient
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for bucket in buckets:
            bucket.copy_to_model(self.mixing)

    @torch.no_grad()
    def _sync_and_avg_model_params(self) -> None:
        """Ends all exchanges, and averages the steps of ranks since the last ones."""
        for exchange in list(self.exchanges):
            self._finish(exchange)
        behind = [index for index, each in enumerate(self.fragments) if each.started < self.num_steps]
        for exchange in [self._start(index) for index in behind]:
            for bucket, mean in zip(self.fragments[exchange.index].buckets, exchange.means, strict=True):
                bucket.flat.sub_(mean.wait().to(bucket.flat.device))
        for fragment in self.fragments:
            for bucket in fragment.buckets:
                bucket.copy_to_model()
        if buffers := list(self.model.buffers()):
            broadcast(buffers)

    # Checkpoints

    def parts(self, index: int) -> list[Part]:
        return [*super().parts(index), GlobalState(index, self)]

    def saved_weights(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the weights that a checkpoint has for the model, which are the global parameters.

        It waits for the means of started exchanges, which are saved as well. Called on all ranks.
        """
        if self.is_applied:
            raise StateError("save_state() inside of applied() of DiLoCo: leave the block before the save.")
        for exchange in self.exchanges:
            for mean in exchange.means:
                mean.wait()
        views = {
            (parameter.data_ptr(), parameter.shape): view.detach().to(parameter.dtype)
            for parameter, view in zip(self.parameters, self.globals, strict=True)
            if parameter.numel()
        }
        return {
            name: views.get((value.data_ptr(), value.shape), value) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    def nbytes(self) -> int:
        return 2 * sum(view.nbytes for view in self.globals)


def build_outer_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the outer optimizer of the DiLoCo paper."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _check_options(
    steps: int, num_fragments: int, delay: int, mixing: float | None, quantize: str | None
) -> None:
    integers = (
        ("local_sgd_steps", steps, 1, None),
        ("num_fragments", num_fragments, 1, steps),
        ("delay", delay, 0, steps),
    )
    for name, value, least, limit in integers:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise wrong_value(name, value, f"it is not an integer of at least {least}", "Pass one")
        if limit is not None and value > limit - (name == "delay"):
            reason = f"an interval of local_sgd_steps={steps} has one exchange of each fragment"
            raise wrong_value(name, value, reason, "Pass a smaller number, or more steps")
    is_number = isinstance(mixing, (int, float)) and not isinstance(mixing, bool)
    if mixing is not None and not (is_number and 0 <= mixing < 1):
        reason = "a rank keeps this part of its own weights"
        raise wrong_value(
            "mixing", mixing, reason, "Pass a number of at least 0 and less than 1, such as 0.5"
        )
    if quantize not in (None, "int8"):
        raise wrong_value("quantize", quantize, "no such format", 'Pass "int8", or None for full precision')


def _check_strategy(accelerator: Accelerator, model: nn.Module) -> None:
    strategy = accelerator._runtime.strategy
    if accelerator._runtime.groups.repeats_steps:
        raise PreparationError(
            "DiLoCo does not work with replica groups (--replicas), which agree on each step and average its "
            "gradients. Launch with --num_processes and without --replicas, or train without DiLoCo."
        )
    if not (strategy.has_plain_weights and strategy.holds_whole_models):
        raise PreparationError(
            f"DiLoCo averages whole models, and {type(strategy).__name__} shards {type(model).__name__} or "
            "keeps its weights itself. Train without it, or with plain data parallelism."
        )


def _check_parameters(parameters: Sequence[Tensor], num_fragments: int) -> None:
    if len(parameters) < num_fragments:
        reason = f"the model trains {len(parameters)} parameters"
        raise wrong_value("num_fragments", num_fragments, reason, "Pass at most one fragment for each")
    for parameter in parameters:
        if parameter.is_meta or not parameter.is_floating_point() or parameter.layout != torch.strided:
            raise PreparationError(
                f"A trained parameter is a {type(parameter).__name__} of {parameter.dtype} on "
                f"{parameter.device}, and DiLoCo averages dense floating-point parameters. Freeze it, or "
                "train without DiLoCo."
            )


def _build_optimizer(build: object, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer that a function of the user builds, after verification."""
    fix = "Pass a function of a list of parameters, such as functools.partial(torch.optim.SGD, lr=0.7)"
    if isinstance(build, torch.optim.Optimizer) or not callable(build):
        reason = "it is not a function that returns the optimizer of the global parameters"
        raise wrong_value("outer_optimizer", build, reason, fix)
    optimizer = build(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise wrong_value("outer_optimizer", build, f"it returns a {type(optimizer).__name__}", fix)
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if set(map(id, stepped)) != set(map(id, parameters)):
        raise wrong_value("outer_optimizer", build, "its optimizer steps other parameters", fix)
    return optimizer


def _checked_device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason, fix = "it is not a device of torch", 'Pass "cpu", or None for the device of the parameters'
        raise wrong_value("device", device, reason, fix) from error
