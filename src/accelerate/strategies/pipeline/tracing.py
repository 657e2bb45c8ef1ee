"""Trace of a forward on one rank, which computes the shapes of all tensors that stages exchange.

The code of the containers runs with the inputs of a micro-batch. Submodules run on fake tensors, so a trace
needs neither weights of other stages nor communication. The trace follows which tensors depend on outputs of
submodules: those among the arguments of the first submodule of a stage are received from the stage before,
and so are others that later code uses, such as those of skip connections.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accelerate import planning, torch_private
from accelerate.base import PreparationError, listed
from accelerate.devices import of_device
from accelerate.nested import TensorInformation
from accelerate.strategies.pipeline.nested_tensors import (
    flatten,
    signature_of,
    specs_of,
    tensors_in,
    to_zeros,
)
from accelerate.strategies.pipeline.split import Split, Submodule


class Call(NamedTuple):
    """Call of a submodule in a forward.

    Attributes:
        outputs: Outputs with specs in place of tensors, or None if each stage computes them.
    """

    submodule: Submodule
    stage: int
    outputs: Any


class TensorKey(NamedTuple):
    """Result of a submodule or of a function in the code of containers, which is the same in each forward.

    Attributes:
        number: Number of such calls before it in the forward.
        position: Position among the tensors of the result.
    """

    is_call: bool
    number: int
    position: int


class FunctionCounter:
    """Number of functions of torch that the code of containers has called in a forward."""

    def __init__(self) -> None:
        self.number = 0
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts no functions inside the block, such as those of a submodule."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False


class Boundary(NamedTuple):
    """Tensors that a stage receives from the one before.

    Attributes:
        positions: Positions of tensors among the flattened arguments of the first submodule.
        keys: Other tensors, which the code of this stage or of a later one uses.
    """

    positions: tuple[int, ...]
    keys: tuple[TensorKey, ...]
    specs: tuple[TensorInformation, ...]


@dataclass
class Trace:
    """Calls of submodules in a forward, and the boundaries of stages after the first.

    Attributes:
        uses_received: Whether code between submodules uses received tensors, such as those of a residual
            connection.
        reads_values: Whether this code reads values of tensors, on which its branches may depend.
    """

    calls: list[Call] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    uses_received: bool = False
    reads_values: bool = False


Placeholders = Mapping[nn.Module, torch_private.Weights]
"""Tensors without memory in place of the parameters and buffers of modules."""


@contextmanager
def fake_weights(placeholders: Placeholders, device: torch.device) -> Iterator[None]:
    """Gives modules fake weights inside the block, which is inside of a `FakeTensorMode`."""

    def fake(kind: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {
            name: None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in kind.items()
        }

    # Forwards may have added buffers since the model was prepared.
    weights = {
        module: (fake(values[0]), fake({**module._buffers, **values[1]}))
        for module, values in placeholders.items()
    }
    with torch_private.replaced_weights(weights):
        yield


@contextmanager
def restored_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores attributes of modules at its end, in which their forwards may cache tensors."""
    kept = [(part, dict(vars(part))) for part in modules]
    values = [value for _, attributes in kept for value in attributes.values()]
    contents: list[tuple[Any, Any]] = [
        (value, value.copy()) for value in values if type(value) in (dict, list, OrderedDict)
    ]
    try:
        yield
    finally:
        for part, attributes in kept:
            vars(part).clear()
            vars(part).update(attributes)
        for value, content in contents:
            value.clear()
            value.update(content) if isinstance(value, dict) else value.extend(content)


Replacements = Mapping[int, tuple[Tensor, Tensor]]
"""Id of a tensor in the code of containers -> this tensor, and the one that the stage has received for it."""


def replace_tensors(replacements: Replacements, values: object) -> Any:
    """Returns nested values with received tensors."""

    def replace(tensor: Tensor) -> Tensor:
        return replacements[id(tensor)][1] if id(tensor) in replacements else tensor

    return torch_private.pytree.tree_map_only(Tensor, replace, values) if replacements else values


_FROM_SHAPES = {
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
    Tensor.new_tensor,
}
"""Functions whose results depend on the shape of a tensor only."""

TO_PYTHON = {
    Tensor.__bool__,
    Tensor.item,
    Tensor.tolist,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__contains__,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.equal,
    Tensor.allclose,
    torch.equal,
    torch.allclose,
}
"""Functions that make the code of a forward depend on the values of a tensor."""


class Tracer(TorchFunctionMode):
    """Context in which a forward is traced.

    Args:
        model: The model, for messages.
        placeholders: Weights of each submodule with parameters, without memory.
        outputs: Outputs of submodules in other traces, to which this one adds.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        placeholders: Mapping[Submodule, Placeholders],
        device: torch.device,
        outputs: dict[Any, Any],
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.stage = 0
        self._model, self._split, self._device = model, split, device
        self._placeholders = placeholders
        self._stage_of: dict[int, tuple[Tensor, int]] = {}  # id -> tensor from submodules, and its stage
        self._key_of: dict[int, TensorKey] = {}
        self._kept: list[dict[TensorKey, TensorInformation]] = [{} for _ in split.starts]  # of each boundary
        self._functions = FunctionCounter()
        self._received: Replacements = {}
        self._drawn: set[int] = set()  # ids of tensors that depend on random numbers only
        self._generators = self._generator_states()
        self._outputs = outputs
        self._owners = {
            id(parameter): submodule
            for submodule in split.submodules
            for parameter in submodule.module.parameters()
        }

    # Submodules

    def call(
        self, submodule: Submodule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the outputs of a submodule, which are zeros of the right shapes."""
        with self._functions.paused():
            outputs, specs = self._run(submodule, run, args, kwargs)
        self._set_keys(tensors_in(outputs), is_call=True, number=len(self.trace.calls))
        self.trace.calls.append(Call(submodule, self.stage, specs))
        return outputs

    def _run(
        self, submodule: Submodule, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self._begins_stage(submodule):
            self._enter(submodule, args, kwargs)
        received = [leaf for leaf in tensors_in((args, kwargs)) if id(leaf) in self._received]
        if received and torch_private.is_in_reentrant_checkpoint():
            raise PreparationError(
                f"{type(self._model).__name__} cannot be split like this: its forward calls "
                f"{submodule.names[0]} in a reentrant checkpoint, which loses the gradients of the tensors "
                "that the stage receives. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
            )
        # Code of containers may pass received tensors to later layers too, such as the output of an encoder.
        args, kwargs = replace_tensors(self._received, (args, kwargs))
        where = f"{submodule.names[0]} on stage {self.stage}"
        self._keep(tensors_in((args, kwargs)), where)
        weights = self._placeholders.get(submodule)
        if weights is not None and self.stage not in submodule.stages:
            raise self._other_stage(submodule)
        if weights is None:
            before = self._generators
            outputs = run(*args, **kwargs)
            if before != self._generators:
                self._mark(tensors_in(outputs))
            depends = any(id(leaf) in self._stage_of for leaf in tensors_in(outputs))
            specs = specs_of(outputs) if depends else None
        else:
            specs = self._outputs_of(submodule, weights, args, kwargs)
            outputs = to_zeros(specs, self._device)
            self._mark(tensors_in(outputs))
            outputs = collect_outputs(submodule.module, args, kwargs, outputs)
        return outputs, specs

    def _begins_stage(self, submodule: Submodule) -> bool:
        """Returns whether the next stage begins with a call of a module, the first one in this forward."""
        if self.stage == len(self._split.starts):
            return False
        if not submodule.has_parameters:  # which any stage may call
            return submodule is self._split.starts[self.stage]
        return min(submodule.stages) == self.stage + 1

    def _other_stage(self, submodule: Submodule) -> PreparationError:
        """Returns the error for a module that the forward calls on a stage that does not have it."""
        name, starts = submodule.names[0], [start.names[0] for start in self._split.starts]
        if min(submodule.stages) > self.stage:
            start = starts[self.stage]
            call = f"{name} before {start}, with which stage {self.stage + 1} begins"
            fix = f"Call the modules of a list in its order, and {start} in each batch (no layer drop)"
        else:
            again = " again" if any(call.submodule is submodule for call in self.trace.calls) else ""
            stages = ", ".join(map(str, sorted(submodule.stages)))
            call = f"{name} of stage {stages}{again} on stage {self.stage}"
            fix = "Register modules in the order of their calls, let one stage compute all calls of a module"
        return PreparationError(
            f"{type(self._model).__name__} cannot be split like this: its forward calls {call}. {fix}, or "
            "name the first module of each stage in PipelineConfig(split=[...]), in the order of the forward."
        )

    def _enter(self, submodule: Submodule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins the next stage, which receives the tensors among the arguments of its first submodule."""
        start = submodule.names[0]
        leaves, _ = flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if id(leaf) in self._stage_of]
        sent = [self._received.get(id(leaves[i]), (None, leaves[i]))[1] for i in positions]
        where = f"{start}, with which stage {self.stage + 1} begins,"
        self._keep(sent, where)
        _refuse_complex(sent, where)
        self.stage += 1
        specs = [TensorInformation(tensor.shape, tensor.dtype) for tensor in sent]
        self.trace.boundaries.append(Boundary(tuple(positions), (), tuple(specs)))
        received = [to_zeros(spec, self._device) for spec in specs]
        self._mark(received)
        self._received = {
            id(leaves[i]): (leaves[i], tensor) for i, tensor in zip(positions, received, strict=True)
        }

    def _outputs_of(
        self, submodule: Submodule, weights: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Returns the outputs of a submodule on fake tensors, with specs in place of tensors.

        Layers of one class, with weights and arguments of the same shapes, run once.
        """
        shapes = [[value for kind in kinds for value in kind.values()] for kinds in weights.values()]
        with torch_private.without_torch_functions():  # which a trace would follow
            key = (type(submodule.module), signature_of((shapes, args, kwargs)))
        if key not in self._outputs:
            self._outputs[key] = self._run_on_fakes(submodule, weights, args, kwargs)
        return self._outputs[key]

    def _run_on_fakes(
        self, submodule: Submodule, weights: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        mode = torch_private.fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        module = submodule.module
        with (
            planning.fake_operators(mode),
            restored_attributes(module.modules()),
            fake_weights(weights, self._device),
        ):
            converted = torch_private.pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            try:
                outputs = module.forward(*converted[0], **converted[1])
            except RuntimeError as error:
                if "data is not allocated" not in str(error):
                    raise
                raise PreparationError(
                    f"{type(self._model).__name__} cannot be split: {submodule.names[0]} "
                    f"({type(module).__name__}) calls an operator that needs the values of a tensor, such as "
                    "pack_padded_sequence, pad_packed_sequence or a recurrent layer with a packed sequence, "
                    "and the trace of a forward has shapes only. Call recurrent layers with padded tensors "
                    "and mask their outputs, or set pp_size=1."
                ) from error
        return specs_of(outputs)

    # Functions in the code of containers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_counted, number = not self._functions.is_paused, self._functions.number
        self._functions.number += is_counted
        inputs = tensors_in((args, kwargs))
        if any(id(tensor) in self._received for tensor in inputs):
            args, kwargs = replace_tensors(self._received, (args, kwargs))
            inputs = tensors_in((args, kwargs))
            self.trace.uses_received = True
        owned = [self._owners[id(tensor)] for tensor in inputs if id(tensor) in self._owners]
        followed = [tensor for tensor in inputs if id(tensor) in self._stage_of]
        name = getattr(func, "__name__", str(func))
        self.trace.reads_values |= func in TO_PYTHON
        is_drawn = self._drawn.issuperset(map(id, followed))
        if func in TO_PYTHON and not is_drawn:
            raise PreparationError(
                f"{type(self._model).__name__} cannot be split: the code between its layers reads the values "
                f"of activations ({name}), which only one stage has. Move this code into a layer."
            )
        outputs = func(*args, **kwargs)
        results, draws = tensors_in(outputs), self._has_drawn()
        if not results or (func in _FROM_SHAPES and not draws):
            return outputs
        if func in _FROM_SHAPES:
            owned, followed, is_drawn = [], [], True
        if owned:
            raise PreparationError(
                f"{type(self._model).__name__} cannot be split: the code between its layers uses a parameter "
                f"of {owned[0].names[0]} ({name}), which other stages do not have. Call the module instead, "
                "or tie the parameter to one of the module that uses it."
            )
        if followed or draws:
            self._keep(followed, f"{name} on stage {self.stage}")
            self._mark(results)
            change = self._drawn.update if is_drawn else self._drawn.difference_update
            change(map(id, results))
            if is_counted:
                self._set_keys(results, is_call=False, number=number)
        return outputs

    # Tensors that depend on submodules, or on random numbers, of which each stage would draw other ones

    def _has_drawn(self) -> bool:
        """Returns whether random numbers have been drawn since the last call."""
        before, self._generators = self._generators, self._generator_states()
        return before != self._generators

    def _generator_states(self) -> list[bytes]:
        with torch_private.without_torch_functions(), torch_private.dispatch_modes_disabled():
            states = torch.get_rng_state(), of_device(self._device).rng_state()
            return [state.numpy().tobytes() for state in states]

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        self._stage_of.update({id(tensor): (tensor, self.stage) for tensor in tensors})

    def _set_keys(self, tensors: Sequence[Tensor], *, is_call: bool, number: int) -> None:
        for index, tensor in enumerate(tensors):
            if id(tensor) in self._stage_of:  # and not the input that a function has returned
                self._key_of.setdefault(id(tensor), TensorKey(is_call, number, index))

    def _keep(self, tensors: Iterable[Tensor], where: str) -> None:
        """Lets stages pass on tensors of earlier stages, which code of the current one uses."""
        for tensor in tensors:
            _, stage = self._stage_of.get(id(tensor), (tensor, self.stage))
            if stage == self.stage:
                continue
            key = self._key_of.get(id(tensor))
            if key is None:
                raise PreparationError(
                    f"{type(self._model).__name__} cannot be split here: {where} uses a tensor of stage "
                    f"{stage}, whose origin in the code between layers is not known. Begin the stage at "
                    "another module, in PipelineConfig(split=[...])."
                )
            _refuse_complex([tensor], where)
            for boundary in self._kept[stage : self.stage]:
                boundary[key] = TensorInformation(tensor.shape, tensor.dtype)

    def finish(self, outputs: object) -> Trace:
        """Returns the trace of a forward with these outputs."""
        if self.stage < len(self._split.starts):
            missing = [start.names[0] for start in self._split.starts[self.stage :]]
            raise PreparationError(
                f"The forward of {type(self._model).__name__} does not call {listed(missing)}, with which "
                "stages begin. Name modules that it calls in PipelineConfig(split=[...])."
            )
        outputs = replace_tensors(self._received, outputs)
        self._keep(tensors_in(outputs), f"the output of {type(self._model).__name__}")
        trace = self.trace
        for index, kept in enumerate(self._kept):
            positions, _, specs = trace.boundaries[index]
            trace.boundaries[index] = Boundary(positions, tuple(kept), (*specs, *kept.values()))
            trace.uses_received |= bool(kept)
        return trace


def _refuse_complex(tensors: Iterable[Tensor], where: str) -> None:
    if any(tensor.is_complex() for tensor in tensors):
        raise PreparationError(
            f"{where} uses a complex tensor, and stages exchange no gradients of complex tensors. Pass "
            "torch.view_as_real(tensor), or begin the stage at another module, in "
            "PipelineConfig(split=[...])."
        )


def collect_outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: object
) -> Any:
    """Returns the outputs in place of those of a layer, which models of transformers collect by a hook.

    Other hooks, such as those of statistics, are called on the stage that computes the layer.
    """
    source = "transformers.utils.output_capturing"
    return torch_private.call_forward_hooks(module, args, kwargs, outputs, source)
