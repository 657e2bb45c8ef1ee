"""Weights of layers on other ranks of a pipeline, for code outside of the forward.

A layer of another rank has no weights, so a loop such as `zip(model.student.parameters(),
model.teacher.parameters())` would end early. Its methods return tensors without values instead, whose use
together with tensors of this rank raises an error. So do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import StateError
from accelerate.strategies.pipeline.tracing import TO_PYTHON

_WEIGHTS, _NAME = "_weights_on_other_ranks", "_name_in_pipeline"
"""Attributes of modules with their parameters and buffers on other ranks, and with their name."""
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}


class AbsentAttributeError(StateError, AttributeError):
    """Error for an attribute of a layer that only the rank of the layer has."""


class AbsentTensor(Tensor):
    """Parameter or buffer on another rank of a pipeline, without values.

    Optimizers may have it, functions of absent tensors return absent tensors, and a function of one and of a
    tensor with values raises an error.
    """

    layer: str
    """Name of the layer, with its stages."""
    rank_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the rank, where code creates tensors for this one, but meta inside of operators."""
        return self.rank_device if torch_private.is_torch_function_enabled() else super().device

    @property
    def grad(self) -> AbsentTensor | None:
        """Gradient without values of a parameter that is trained, so that sums over gradients are refused."""
        if not (self.is_leaf and self.requires_grad):
            return None
        return absent_tensor(self.detach(), self.layer, self.rank_device)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, AbsentTensor):
            _refuse_values(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        return memo.setdefault(id(self), absent_tensor(self, self.layer, self.rank_device))  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tensors = [
            leaf for leaf in torch_private.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        absent = next(tensor for tensor in tensors if isinstance(tensor, AbsentTensor))
        others = [tensor for tensor in tensors if not isinstance(tensor, AbsentTensor)]
        # A rate of an optimizer, for example, may be an argument, but not one of several tensors.
        has_values = (
            any(tensor.ndim for tensor in others)
            or not isinstance(tensors[0], AbsentTensor)
            or any(
                isinstance(arg, (list, tuple)) and not set(map(id, others)).isdisjoint(map(id, arg))
                for arg in args
            )
        )
        if func in TO_PYTHON or func is Tensor.backward or (others and has_values):
            _refuse_values(absent)
        if func in _MOVES:
            func, args, kwargs = Tensor.detach, args[:1], {}
        with _Draws(absent.rank_device):
            outputs = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for output in torch_private.pytree.tree_leaves(outputs):
            if isinstance(output, AbsentTensor) and "layer" not in vars(output):
                output.layer, output.rank_device = absent.layer, absent.rank_device
        return outputs


class _Draws(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Draws random values for tensors without values, too, so that the generators of all ranks stay equal."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch_private.draws_random_numbers(func, args, kwargs):
            values = torch_private.pytree.tree_map_only(
                Tensor, lambda tensor: torch.empty_like(tensor, device=self.device), (args, kwargs)
            )
            func(*values[0], **values[1])
        return func(*args, **kwargs)


def absent_tensor(tensor: Tensor, layer: str, device: torch.device) -> AbsentTensor:
    """Returns a tensor in place of one that this rank does not have."""
    # Of a DTensor, such as those of experts, torch would make another one.
    plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    absent: Any = plain.as_subclass(AbsentTensor)
    absent.layer, absent.rank_device = layer, device
    if isinstance(tensor, nn.Parameter):
        absent = nn.Parameter(absent, tensor.requires_grad)
    return absent  # type: ignore[no-any-return]


def _refuse_values(tensor: AbsentTensor) -> NoReturn:
    raise StateError(
        f"The values of a weight of {tensor.layer} are not on this rank, and code outside of the model uses "
        "them. Compute this in the forward of the model, begin stages at other layers with "
        "PipelineConfig(split=[...]), gather whole weights with accelerator.get_state_dict(model), "
        "average weights with accelerator.average(model), or compute the norm of the gradients with "
        "accelerator.clip_grad_norm_(model.parameters(), float('inf'))."
    )


def show_absent_weights(model: nn.Module, layers: Mapping[nn.Module, str], device: torch.device) -> None:
    """Lets modules of a model return absent weights.

    `named_parameters` of the model itself yields its own parameters only.

    Args:
        layers: Name of the layer of each module whose weights are on other ranks.
    """
    known = {
        id(weight): weight for part in model.modules() if part not in layers for weight in _own_weights(part)
    }  # tied ones are on this rank, too
    for part, layer in layers.items():
        known |= {
            id(weight): absent_tensor(weight, layer, device)
            for weight in _own_weights(part)
            if id(weight) not in known
        }
    whole: Any = type(model)
    model.__class__ = _with_all_positions(whole)
    for name, module in list(model.named_modules()):
        if module in layers:
            module.__dict__[_WEIGHTS] = tuple(
                {key: known[id(weight)] for key, weight in weights.items() if weight is not None}
                for weights in (module._parameters, module._buffers)
            )
        if name and any(part in layers for part in module.modules()):
            module.__dict__[_NAME] = name
            kind: Any = type(module)
            module.__class__ = _with_absent_weights(kind)


def _own_weights(module: nn.Module) -> list[Tensor]:
    weights = (*module._parameters.values(), *module._buffers.values())
    return [weight for weight in weights if weight is not None]


@cache
def _with_all_positions(kind: Any) -> type[nn.Module]:
    """Returns a class whose `parameters` include absent ones, as copies are matched by position."""

    def parameters(self: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
        modules = self.named_modules() if recurse else [("", self)]
        return (weight for _, weight in _named_weights(modules, 0, remove_duplicate=True))

    members = {"parameters": parameters, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


@cache
def _with_absent_weights(kind: Any) -> type[nn.Module]:
    """Returns a class whose instances have the weights of other ranks as absent tensors."""

    def getattr_or_absent(self: nn.Module, name: str) -> Any:
        weights: tuple[Mapping[str, Any], ...] = self.__dict__.get(_WEIGHTS, ())
        try:
            value = kind.__getattr__(self, name)
        except AttributeError as error:
            if not weights:
                raise
            raise AbsentAttributeError(
                f"{self.__dict__[_NAME]} has no attribute {name!r} on this rank, because another rank of the "
                "pipeline computes this layer. Return the value from the layer and from the forward of the "
                "model, or begin stages at other layers with PipelineConfig(split=[...])."
            ) from error
        if value is None:
            value = next((each[name] for each in weights if name in each), None)
        return value

    def named(kind: int) -> Callable[..., Iterator[tuple[str, Tensor]]]:
        def named_weights(
            self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, Tensor]]:
            modules: Iterable[tuple[str, nn.Module]] = [(prefix, self)]
            if recurse:
                modules = self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
            return _named_weights(modules, kind, remove_duplicate)

        return named_weights

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("destination") is None:  # not called for the model around it
            _refuse_states(self)
        return kind.state_dict(self, *args, **kwargs)

    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_states(self)

    members = {
        "__getattr__": getattr_or_absent,
        "named_parameters": named(0),
        "named_buffers": named(1),
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), members)


def _named_weights(
    modules: Iterable[tuple[str, nn.Module]], kind: int, remove_duplicate: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of modules, or the buffers if `kind` is 1, with absent ones."""
    seen = set[int]()
    for prefix, module in modules:
        absent: Mapping[str, Any] = module.__dict__.get(_WEIGHTS, ({}, {}))[kind]
        for name, own in (module._parameters, module._buffers)[kind].items():
            tensor = absent.get(name) if own is None else own
            if tensor is not None and id(tensor) not in seen:
                seen.update({id(tensor)} if remove_duplicate else ())
                yield f"{prefix}.{name}" if prefix else name, tensor


def _refuse_states(module: nn.Module) -> NoReturn:
    name = module.__dict__[_NAME]
    raise StateError(
        f"{name} is in a pipeline, and this rank does not have all of its layers, so its state dict is not "
        "known here. Call accelerator.get_state_dict(model) on all ranks for the weights of the model, load "
        f"weights of {name} before `prepare`, and use accelerator.average(model) for averages."
    )
