"""Random functions that return fixed values, so that two computations of a model can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate import torch_private

Draw = tuple[str, tuple[int, ...]]
"""Name of an operator that draws random numbers, and the shape of them."""
Replacement = Callable[[Any, Mapping[str, Any]], Any]
"""Function that changes the outputs of an operator in place, by its arguments."""


def _fill(value: Callable[[Mapping[str, Any]], Any]) -> Replacement:
    """Returns a function that fills the output of an operator with a value of its arguments."""

    def fill(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        filled = value(arguments)
        return output.copy_(filled) if isinstance(filled, Tensor) else output.fill_(filled)

    return fill


def _constant(value: float) -> Replacement:
    return _fill(lambda _: value)


def _uniform(share: float) -> Replacement:
    return _fill(lambda each: each["from"] + share * (each["to"] - each["from"]))


def _normal(deviations: float) -> Replacement:
    return _fill(lambda each: each["mean"] + deviations * each["std"])


def _bernoulli(is_likely: bool) -> Replacement:
    """Returns a function that fills with the probability, or with the most or least likely of 0 and 1."""

    def value(arguments: Mapping[str, Any]) -> Any:
        p = arguments.get("p", arguments["self"])
        if isinstance(p, Tensor):
            return (p >= 0.5) == is_likely
        return p if is_likely else 0.0

    return _fill(value)


def _without_dropout(outputs: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the input of a dropout and a mask that keeps all of it."""
    values, mask = outputs
    return values.copy_(arguments.get("input", arguments.get("self"))), mask.fill_(1)


def _all_dropped(outputs: Any, arguments: Mapping[str, Any]) -> Any:
    values, mask = outputs
    return values.zero_(), mask.zero_()


def _multinomial(is_likely: bool) -> Replacement:
    def choose(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        return output.copy_(arguments["self"].topk(arguments["num_samples"], largest=is_likely).indices)

    return choose


def _randperm(is_reversed: bool) -> Replacement:
    def order(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        numbers = torch.arange(arguments["n"])
        return output.copy_(numbers.flip(0) if is_reversed else numbers)

    return order


MAX_FIXED = 256
"""Draws of the same kind and shape that return the same values, but for dropout."""
_RAND, _RANDN = [_constant(0.75), _constant(1e-3)], [_constant(0.5), _constant(-1.5)]
_NORMAL, _BERNOULLI = [_normal(0.5), _normal(-1.5)], [_bernoulli(True), _bernoulli(False)]
_OF_DROPOUT = ("native_dropout", "_fused_dropout", "bernoulli_")
_DROPOUT = [_without_dropout, _all_dropped]
_RANDINT = [_fill(lambda each: each.get("low", 0)), _fill(lambda each: each["high"] - 1)]
_FIXED: dict[str, Sequence[Replacement]] = {
    "rand": _RAND,
    "rand_like": _RAND,
    "uniform_": [_uniform(0.75), _uniform(1e-3)],
    "randn": _RANDN,
    "randn_like": _RANDN,
    "normal": _NORMAL,
    "normal_": _NORMAL,
    "geometric_": [_constant(2.0), _constant(5.0)],
    "cauchy_": [_constant(0.5), _constant(-1.5)],
    "log_normal_": [_constant(0.5), _constant(2.0)],
    "random_": [_constant(0), _constant(1)],
    "poisson": [_fill(lambda each: each["self"]), _fill(lambda each: each["self"] + 1)],
    "exponential_": [_fill(lambda each: 1.0 / each["lambd"]), _fill(lambda each: 3.0 / each["lambd"])],
    "randint": _RANDINT,
    "randint_like": _RANDINT,
    "randperm": [_randperm(False), _randperm(True)],
    "bernoulli": _BERNOULLI,
    "bernoulli_": _BERNOULLI,
    "native_dropout": _DROPOUT,
    "_fused_dropout": _DROPOUT,
    "multinomial": [_multinomial(True), _multinomial(False)],
}
"""Operators of ATen by name, and what replaces their output, with another choice.

Numbers are not the mean, because noise with a mean of zero must not vanish: its scale may depend on a shape.
"""


class FixedDraws(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Context in which random operators return fixed values, and dropout keeps all values.

    Other random operators draw as after `torch.manual_seed(0)`. The caller restores the generators of torch.

    Args:
        others: Draws whose values are other fixed ones, by which code that depends on them is found.
    """

    supports_higher_order_operators = True  # such as flex_attention, which draws no numbers

    def __init__(self, others: Collection[Draw] = ()) -> None:
        super().__init__()
        self.draws: set[Draw] = set()  # from the generators of torch
        self._num_draws: Counter[Draw] = Counter()
        self._others = others

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
        is_own = arguments.get("generator") is not None
        if is_own:  # that of the user keeps its state
            arguments["generator"] = torch.Generator(arguments["generator"].device).manual_seed(0)
        else:
            torch.manual_seed(0)
        outputs, name = torch_private.call_with(func, arguments), func.overloadpacket.__name__
        if name not in _FIXED:
            return outputs
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        draw = name, tuple(first.shape)
        if not is_own:
            self.draws.add(draw)
        self._num_draws[draw] += 1
        if (
            self._num_draws[draw] > MAX_FIXED and name not in _OF_DROPOUT
        ):  # in a loop that waits for another value
            seed = arguments["generator"].manual_seed if is_own else torch.manual_seed
            seed(self._num_draws[draw])
            return torch_private.call_with(func, arguments)
        return _FIXED[name][draw in self._others](outputs, arguments)
