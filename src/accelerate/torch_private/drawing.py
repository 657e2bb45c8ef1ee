"""Random numbers that do not depend on the number of processes, and dropout that is turned off.

In a training step, random tensors with one row for each sample of the batch are drawn for the batch of all
ranks, of which each rank takes its rows. So the noise of a diffusion model is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
FACTORIES = ("rand", "randn")
ALIKE = {"rand_like": "rand", "randn_like": "randn", "randint_like": "randint"}
IN_PLACE = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")


class Batch(Protocol):
    """The rows of the current training batch on this rank, and among those of all ranks."""

    rows: int | None
    num_groups: int
    group: int


def turn_off_dropout() -> None:
    """Replaces the dropout functions of torch by ones that return their input."""
    for name in DROPOUTS:
        setattr(F, name, _keep_all)


def _keep_all(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # the name of torch's argument
    return input


def turn_off_dropout_of(model: nn.Module) -> None:
    """Sets the probabilities of dropout in the attributes of modules to 0."""
    for module in model.modules():
        is_dropout = "drop" in type(module).__name__.lower() or isinstance(
            module, nn.modules.dropout._DropoutNd
        )
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name.lower() or (is_dropout and name == "p")):
                setattr(module, name, 0.0)


def draw_for_whole_batches(batch: Batch) -> None:
    """Replaces functions of torch that draw random tensors."""
    originals = {
        name: getattr(torch, name) for name in (*FACTORIES, "randint", "normal", "bernoulli", *ALIKE)
    }

    def is_row(size: Any, options: dict[str, Any]) -> bool:
        is_drawn = options.get("generator") is None and options.get("out") is None
        return is_drawn and batch.rows is not None and len(size) > 0 and size[0] == batch.rows

    def draw(size: Any, make: Callable[[tuple[int, ...]], Tensor], requires_grad: bool = False) -> Tensor:
        assert batch.rows is not None
        whole = make((batch.rows * batch.num_groups, *size[1:]))
        own = whole.narrow(0, batch.group * batch.rows, batch.rows).clone()
        return own.requires_grad_() if requires_grad else own

    def replace_factory(name: str) -> None:
        original = originals[name]

        @wraps(original)
        def factory(*args: Any, **kwargs: Any) -> Tensor:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if not is_row(size, kwargs):
                return original(*args, **kwargs)  # type: ignore[no-any-return]
            kwargs.pop("size", None)
            requires_grad = kwargs.pop("requires_grad", False)
            return draw(size, lambda whole: original(whole, **kwargs), requires_grad)

        setattr(torch, name, factory)

    @wraps(originals["randint"])
    def randint(*args: Any, **kwargs: Any) -> Tensor:
        size = kwargs.get("size", args[-1] if args else ())
        if not (isinstance(size, (tuple, list, torch.Size)) and is_row(size, kwargs)):
            return originals["randint"](*args, **kwargs)  # type: ignore[no-any-return]
        bounds = args if "size" in kwargs else args[:-1]
        rest = {name: value for name, value in kwargs.items() if name != "size"}
        return draw(size, lambda whole: originals["randint"](*bounds, size=whole, **rest))

    def replace_alike(name: str) -> None:
        original, factory = originals[name], originals[ALIKE[name]]

        @wraps(original)
        def alike(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if type(input) is not Tensor or not is_row(input.shape, kwargs):
                return original(input, *args, **kwargs)  # type: ignore[no-any-return]
            options = {"dtype": input.dtype, "device": input.device, **kwargs}
            options.pop("memory_format", None)
            requires_grad = options.pop("requires_grad", False)
            bounds = (0, *args)[-2:] if args else ()
            return draw(input.shape, lambda whole: factory(*bounds, whole, **options), requires_grad)

        setattr(torch, name, alike)

    @wraps(originals["normal"])
    def normal(mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Tensor:
        like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
        size = kwargs.get("size", args[0] if args else ()) if like is None else like.shape
        if not is_row(size, kwargs):
            return originals["normal"](mean, std, *args, **kwargs)  # type: ignore[no-any-return]
        own = {"dtype": like.dtype, "device": like.device} if like is not None else {}
        options = {**own, **{name: value for name, value in kwargs.items() if name != "size"}}
        drawn = draw(size, lambda whole: originals["randn"](whole, **options))
        result: Tensor = drawn * std + mean
        return result

    @wraps(originals["bernoulli"])
    def bernoulli(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or "p" in kwargs or type(input) is not Tensor or not is_row(input.shape, kwargs):
            return originals["bernoulli"](input, *args, **kwargs)  # type: ignore[no-any-return]
        drawn = draw(input.shape, lambda whole: originals["rand"](whole, device=input.device))
        return (drawn < input).to(input.dtype)

    def replace_in_place(name: str) -> None:
        original = getattr(Tensor, name)

        @wraps(original)
        def fill(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if type(self) is not Tensor or not is_row(self.shape, kwargs):
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            with torch.no_grad():
                filled = draw(self.shape, lambda whole: original(self.new_empty(whole), *args, **kwargs))
            return self.copy_(filled)

        setattr(Tensor, name, fill)

    for name in FACTORIES:
        replace_factory(name)
    for name in ALIKE:
        replace_alike(name)
    for name in IN_PLACE:
        replace_in_place(name)
    for function in (randint, normal, bernoulli):
        setattr(torch, function.__name__, function)
