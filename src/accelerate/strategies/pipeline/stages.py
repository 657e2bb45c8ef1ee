"""Model whose stages are on different ranks, and the modules of the stages of this rank.

The model stays the module of the user. Submodules of other stages have no parameters, and return zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import rng, torch_private
from accelerate.base import ConfigurationError, PreparationError, StateError
from accelerate.strategies.dtensors import fsdp2_canonicalize_names
from accelerate.strategies.pipeline.absent import show_absent_weights
from accelerate.strategies.pipeline.nested_tensors import flatten, tensors_in, to_zeros
from accelerate.strategies.pipeline.split import Split, Submodule
from accelerate.strategies.pipeline.tracing import (
    Boundary,
    Call,
    FunctionCounter,
    Replacements,
    TensorKey,
    Trace,
    Tracer,
    collect_outputs,
    replace_tensors,
    restored_attributes,
)
from accelerate.strategies.views import identical
from accelerate.wrappers import FunctionMode

_OWNER = "_pipeline_of_submodule"
"""Attribute of submodules and of the model, with the function that replaces their `__call__`."""


@dataclass
class StageRun:
    """Forward of one micro-batch on one stage.

    Attributes:
        received: Tensors from the stage before.
    """

    stage: int
    trace: Trace
    received: Sequence[Tensor]
    _position: int = field(default=0, init=False)
    _received: Replacements = field(default_factory=dict, init=False)
    _kept: dict[TensorKey, Tensor] = field(default_factory=dict, init=False)
    _functions: FunctionCounter = field(default_factory=FunctionCounter, init=False)

    def __post_init__(self) -> None:
        neighbors = self.trace.boundaries[max(self.stage - 1, 0) : self.stage + 1]
        self._keys = {key[:2] for boundary in neighbors for key in boundary.keys}

    def call(
        self,
        device: torch.device,
        submodule: Submodule,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns the outputs of a submodule, or zeros if another stage computes it."""
        with self._functions.paused():
            call = self._next_call(submodule, args, kwargs)
            args, kwargs = self.replace_received((args, kwargs))
            if call.stage == self.stage or call.outputs is None:
                outputs = run(*args, **kwargs)
            else:
                zeros = to_zeros(call.outputs, device)
                outputs = collect_outputs(submodule.module, args, kwargs, zeros)
        self._keep(outputs, is_call=True, number=self._position - 1)
        return outputs

    def call_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns the outputs of a function of torch in a forward, with the tensors that were received."""
        args, kwargs = self.replace_received((args, kwargs))
        outputs = func(*args, **kwargs)
        if not self._functions.is_paused:
            self._keep(outputs, is_call=False, number=self._functions.number)
            self._functions.number += 1
        return outputs

    def _keep(self, outputs: object, *, is_call: bool, number: int) -> None:
        if (is_call, number) in self._keys:
            for index, tensor in enumerate(tensors_in(outputs)):
                self._kept.setdefault(TensorKey(is_call, number, index), tensor)

    def _next_call(self, submodule: Submodule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Returns the call of a submodule in the trace, and begins or ends the stage where it does so."""
        position, self._position = self._position, self._position + 1
        calls = self.trace.calls
        if position >= len(calls) or calls[position].submodule is not submodule:
            raise PreparationError(
                f"{submodule.names[0]} is called in another order than in the trace of this forward. The "
                "code between layers must call the same layers for inputs of the same shapes."
            )
        call = calls[position]
        begins = position == 0 or calls[position - 1].stage < call.stage
        if begins and call.stage == self.stage + 1:
            boundary = self.trace.boundaries[self.stage]
            tensors = self.replace_received(self._tensors_of(boundary, args, kwargs))
            raise StageEnd(boundary, tensors, submodule.names[0])
        if begins and call.stage == self.stage and self.stage > 0:
            replaced = self._tensors_of(self.trace.boundaries[self.stage - 1], args, kwargs)
            _set_values(replaced, self.received)
            self._received = {id(old): (old, new) for old, new in zip(replaced, self.received, strict=True)}
        return call

    def _tensors_of(self, boundary: Boundary, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the tensors of a boundary, in whose first submodule the forward is."""
        leaves, _ = flatten((args, kwargs))
        return [*(leaves[i] for i in boundary.positions), *(self._kept[key] for key in boundary.keys)]

    def replace_received(self, values: object) -> Any:
        """Returns nested values with received tensors."""
        return replace_tensors(self._received, values)


def _set_values(replaced: Sequence[Any], received: Sequence[Tensor]) -> None:
    """Gives tensors of the code of containers the values of received ones.

    The recomputation of `torch.utils.checkpoint` runs after the forward, with the tensors of this code.
    """
    for old, new in zip(replaced, received, strict=True):
        if new.requires_grad and torch.is_grad_enabled():
            old.data = new.detach()
            old.requires_grad_()


class StageEnd(Exception):
    """Raised inside a forward where the next stage begins, with the tensors to send to it."""

    def __init__(self, boundary: Boundary, tensors: list[Any], start: str) -> None:
        super().__init__(start)
        self.boundary, self.tensors, self.start = boundary, tensors, start

    def checked(self) -> tuple[Tensor, ...]:
        """Returns the tensors in the dtypes of the next stage, if they have the shapes that it expects."""
        for tensor, spec in zip(self.tensors, self.boundary.specs, strict=True):
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            if got != list(spec.shape):
                raise PreparationError(
                    f"The stage that ends before {self.start} passes on {got}, and the next stage expects "
                    f"{list(spec.shape)}: the outputs of a layer have another shape than its trace on fake "
                    "tensors. Split the model at another module, in PipelineConfig(split=[...])."
                )
        # FSDP may compute in another dtype than that of the weights in the trace. Schedules detach outputs in
        # place, which neither views nor tensors that a backward pass needs allow.
        return tuple(
            identical(tensor.to(spec.dtype).contiguous())
            for tensor, spec in zip(self.tensors, self.boundary.specs, strict=True)
        )


class PipelineModel:
    """Pipeline of a model.

    Args:
        model: A model with all its parameters. Those of stages on other ranks are removed from it.
        own_stages: Indices of the stages on this rank.
        evaluate: Called with the arguments of the model when the user calls it.

    Attributes:
        specs: Weights of the whole model by name on the meta device, in the order of its state dict.
        aliases: All names of each weight by its name.
        holders: Stages of each parameter or buffer by its name.
        containers: Modules whose code runs on each stage.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        own_stages: Sequence[int],
        device: torch.device,
        evaluate: Callable[..., Any],
    ) -> None:
        self.model, self.split, self.own_stages = model, split, tuple(own_stages)
        self.device = device
        self.num_stages = len(split.starts) + 1
        self.containers = [model.get_submodule(name) for name in split.containers]
        state = model.state_dict(keep_vars=True)
        self.specs = {
            name: torch.empty_like(value, device="meta")
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        by_id: dict[int, list[str]] = {}
        for name, value in state.items():
            by_id.setdefault(id(value), []).append(name)
        self.aliases = {name: names for names in by_id.values() for name in names}
        self.holders = dict(self._find_holders())
        self._run: StageRun | Tracer | None = None
        self._outputs: dict[Any, dict[Any, Any]] = {}  # of submodules in traces
        self._placeholders = {
            submodule: {
                part: torch_private.placeholder_weights(part, device) for part in submodule.module.modules()
            }
            for submodule in split.submodules
            if submodule.has_parameters
        }
        absent = [submodule for submodule in self._placeholders if self._is_absent(submodule)]
        present = {part for each in self._placeholders.keys() - absent for part in self._placeholders[each]}
        self._absent = {
            part: weights
            for each in absent
            for part, weights in self._placeholders[each].items()
            if part not in present  # which layers on several stages have in common
        }
        for submodule in split.submodules:
            self._replace_call(submodule)
        _set_call(model, evaluate)
        model.register_load_state_dict_pre_hook(self._drop_absent_weights)  # type: ignore[no-untyped-call]
        layers = {
            part: f"{each.names[0]} on stage {', '.join(map(str, sorted(each.stages)))}"
            for each in absent
            for part in each.module.modules()
            if part in self._absent
        }
        show_absent_weights(model, layers, device)
        for part in self._absent:
            torch_private.remove_weights(part)

    def _drop_absent_weights(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Removes the weights of other ranks from a state dict of the whole model that is loaded."""
        for name in self.specs.keys() - model.state_dict().keys():
            state.pop(f"{prefix}{name}", None)

    def _is_absent(self, submodule: Submodule) -> bool:
        return submodule in self._placeholders and not submodule.stages & set(self.own_stages)

    def _find_holders(self) -> Iterator[tuple[str, set[int]]]:
        """Yields the name of each parameter and buffer with the stages that have it, also by a tied name."""
        stages_of = {
            name: submodule.stages for submodule in self.split.submodules for name in submodule.names
        }
        named = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        tensors = fsdp2_canonicalize_names(named).items()
        by_tensor: dict[int, set[int]] = {}
        for name, tensor in tensors:
            owners = [owner for owner in stages_of if name == owner or name.startswith(f"{owner}.")]
            stages = stages_of[owners[0]] if owners else set(range(self.num_stages))
            by_tensor.setdefault(id(tensor), set()).update(stages)
        for name, tensor in tensors:
            yield name, by_tensor[id(tensor)]

    # Calls

    def _replace_call(self, submodule: Submodule) -> None:
        def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if isinstance(self._run, StageRun):
                return self._run.call(self.device, submodule, run, args, kwargs)
            if isinstance(self._run, Tracer):
                return self._run.call(submodule, run, args, kwargs)
            if self._is_absent(submodule):
                stages = ", ".join(map(str, sorted(submodule.stages)))
                raise StateError(
                    f"{submodule.names[0]} is on stage {stages} of the pipeline, and not on this rank. Call "
                    "the whole model, on all ranks."
                )
            return run(*args, **kwargs)

        _set_call(submodule.module, call)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the forward of the user's model."""
        return self.model(*args, **kwargs)

    @property
    def is_running(self) -> bool:
        """True inside a forward of a stage or a trace."""
        return self._run is not None

    def running(self) -> AbstractContextManager[None]:
        """Returns a context manager in which forwards may read shapes of weights of other stages."""
        return torch_private.replaced_weights(self._absent, has_hooks=True)

    def outside(self) -> AbstractContextManager[None]:
        """Returns a context manager, inside of `running`, for code outside of a forward, such as a loss."""
        hidden: dict[nn.Module, torch_private.Weights] = {
            part: (dict.fromkeys(parameters), dict.fromkeys(buffers))
            for part, (parameters, buffers) in self._absent.items()
        }
        return torch_private.replaced_weights(hidden, has_hooks=True)

    @torch.no_grad()
    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: object) -> Trace:
        """Returns the trace of a forward, without communication and without a change of random states.

        Args:
            mode: Settings on which the outputs of submodules depend, such as that of autocast.
        """
        outputs_of_submodules = self._outputs.setdefault(mode, {})
        tracer = Tracer(self.model, self.split, self._placeholders, self.device, outputs_of_submodules)
        self._run = tracer
        kept = [(buffer, buffer.clone()) for buffer in self._buffers_of_traces()]
        try:
            with rng.restored_generators(self.device), restored_attributes(self.containers), tracer:
                outputs = self.forward(args, kwargs)
        except (ConfigurationError, PreparationError, StateError):
            raise
        except Exception as error:
            raise PreparationError(
                f"{type(self.model).__name__} cannot be split: its forward raises {type(error).__name__} in "
                f"the trace of a micro-batch ({error}). The code between layers runs on each stage, where "
                "layers of other stages return zeros and set no attributes. Tensors of the batch with as "
                "many entries as its first one are split into micro-batches."
            ) from error
        finally:
            self._run = None
            for buffer, values in kept:
                buffer.copy_(values)
        return tracer.finish(outputs)

    def _buffers_of_traces(self) -> Iterator[Tensor]:
        """Yields the buffers of modules that run in a trace, such as batch normalization without weights."""
        for submodule in self.split.submodules:
            if not submodule.has_parameters and submodule not in self._placeholders:
                yield from submodule.module.buffers()
        for container in self.containers:
            yield from container.buffers(recurse=False)

    def compute(
        self,
        stage: int,
        trace: Trace,
        received: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Returns the outputs of the model on the last stage, and on others the tensors to send."""
        # Code of the model may change a received tensor in place, which a leaf does not allow.
        self._run = run = StageRun(stage, trace, [identical(tensor) for tensor in received])
        try:
            with FunctionMode(run.call_function) if trace.uses_received else nullcontext():
                outputs = self.forward(args, kwargs)
            return run.replace_received(outputs)
        except StageEnd as end:
            return end.checked()
        finally:
            self._run = None


def is_split(model: nn.Module) -> bool:
    return _OWNER in vars(model)


class StageModule(nn.Module):
    """Modules of one stage, under their names in the model.

    Its forward runs the code of the model between them.
    """

    def __init__(self, pipeline: PipelineModel, stage: int) -> None:
        super().__init__()
        model = pipeline.model
        containers: dict[str, nn.Module] = {"": self}

        def container(name: str) -> nn.Module:
            if name not in containers:
                parent, _, last = name.rpartition(".")
                containers[name] = nn.Module()
                container(parent).add_module(last, containers[name])
            return containers[name]

        for name in pipeline.split.containers:
            original = model.get_submodule(name)
            for key, parameter in original.named_parameters(recurse=False):
                container(name).register_parameter(key, parameter)
            for plan in ("ep_plan", "_ep_plan"):
                if plan in vars(original):
                    setattr(container(name), plan, vars(original)[plan])
        for submodule in pipeline.split.submodules:
            if stage in submodule.stages:
                for name in submodule.names:
                    parent, _, last = name.rpartition(".")
                    container(parent).add_module(last, submodule.module)
        self.whole_on_ranks = {
            parameter
            for name in pipeline.split.containers
            for parameter in model.get_submodule(name).parameters(recurse=False)
        }
        """Parameters that several stages use, which FSDP does not shard."""
        self.model_of_stage = lambda: model  # not a submodule. Other stages have classes that this one lacks.
        for name in ("_no_split_modules", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            if hasattr(model, name):  # FSDP finds its units by them
                setattr(self, name, getattr(model, name))
        self.compute: Callable[..., Any] | None = None
        self.training = model.training

    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        """Computes the stage of a micro-batch.

        Args:
            *received: Tensors from the stage before.
            microbatch: Index of the micro-batch, as a tensor with one element.
        """
        assert self.compute is not None
        return self.compute(received, int(microbatch))


@cache
def _with_replaced_call(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose instances are called through a function of their own."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replaced = self.__dict__[_OWNER]
        return replaced(_original_call(self), *args, **kwargs)

    def refuse_copy(self: nn.Module, protocol: object) -> Any:
        raise StateError(
            f"{kind.__name__} is in a pipeline, so this rank has only some of its layers, and it cannot be "
            "copied or pickled. Copy the model before `prepare`, and pass both to it. For averaged weights "
            "copy model.named_parameters(), and for whole weights call accelerator.get_state_dict(model)."
        )

    names = {
        "__call__": call,
        "__reduce_ex__": refuse_copy,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_called_class": kind,
    }
    return type(kind.__name__, (kind,), names)


def _original_call(module: nn.Module) -> Callable[..., Any]:
    kind: Any = next(
        kind.__dict__["_called_class"] for kind in type(module).__mro__ if "_called_class" in kind.__dict__
    )
    return lambda *args, **kwargs: kind.__call__(module, *args, **kwargs)


def _set_call(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replaces the call of a module by a function, whose first argument is the original call."""
    module.__dict__[_OWNER] = function
    kind: Any = type(module)
    module.__class__ = _with_replaced_call(kind)
