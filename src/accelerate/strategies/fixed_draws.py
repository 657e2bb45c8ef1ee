"""Random functions that return fixed values, so that two computations of a model can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate import torch_private


def _fill(value: Callable[[Mapping[str, Any]], Any]) -> Callable[[Tensor, Mapping[str, Any]], Any]:
    """Returns a function that fills the output of an operator with a value of its arguments."""

    def fill(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        mean = value(arguments)
        return output.copy_(mean) if isinstance(mean, Tensor) else output.fill_(mean)

    return fill


def _probabilities(arguments: Mapping[str, Any]) -> Any:
    """Returns the mean of Bernoulli variables, rounded for a tensor of probabilities."""
    p = arguments.get("p", arguments["self"])
    return p >= 0.5 if isinstance(p, Tensor) else p


def _without_dropout(outputs: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the input of a dropout and a mask that keeps all of it."""
    values, mask = outputs
    return values.copy_(arguments.get("input", arguments.get("self"))), mask.fill_(1)


def _most_likely(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    return output.copy_(arguments["self"].topk(arguments["num_samples"]).indices)


def _in_order(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    return output.copy_(torch.arange(arguments["n"]))


def _normal(arguments: Mapping[str, Any]) -> Any:
    return arguments["mean"] + arguments["std"] / 2


def _uniform(arguments: Mapping[str, Any]) -> Any:
    return arguments["from"] / 4 + arguments["to"] * 3 / 4


_RAND, _RANDN, _NORMAL = _fill(lambda arguments: 0.75), _fill(lambda arguments: 0.5), _fill(_normal)
_LOW = _fill(lambda arguments: arguments.get("low", 0))
_FIXED: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "rand": _RAND,
    "rand_like": _RAND,
    "uniform_": _fill(_uniform),
    "randn": _RANDN,
    "randn_like": _RANDN,
    "normal": _NORMAL,
    "normal_": _NORMAL,
    "exponential_": _fill(lambda arguments: 1.0 / arguments["lambd"]),
    "randint": _LOW,
    "randint_like": _LOW,
    "randperm": _in_order,
    "bernoulli": _fill(_probabilities),
    "bernoulli_": _fill(_probabilities),
    "native_dropout": _without_dropout,
    "_fused_dropout": _without_dropout,
    "multinomial": _most_likely,
}
"""Operators of ATen by name, and what replaces their output.

Numbers are not the mean, because noise with a mean of zero must not vanish: its scale may depend on a shape.
"""


class FixedDraws(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Context in which random operators return fixed values, and dropout keeps all values.

    Other random operators draw as after `torch.manual_seed(0)`. The generators of torch are restored at the
    end if it is inside of `torch.random.fork_rng`.
    """

    supports_higher_order_operators = True  # such as flex_attention, which draws no numbers

    def __init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        arguments = torch_private.arguments_of(func, args, kwargs)
        if "dropout_p" in arguments:
            arguments["dropout_p"] = 0.0
        if arguments.get("generator") is not None:  # that of the user keeps its state
            arguments["generator"] = torch.Generator(arguments["generator"].device).manual_seed(0)
        else:
            torch.manual_seed(0)
        outputs = torch_private.call_with(func, arguments)
        replace = _FIXED.get(func.overloadpacket.__name__)
        return outputs if replace is None else replace(outputs, arguments)
