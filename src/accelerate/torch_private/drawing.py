"""Random numbers that do not depend on the number of processes, and dropout that is turned off.

In a training step, random tensors with one row for each sample of the batch are drawn for the batch of all
ranks, of which each rank takes its rows. So the noise of a diffusion model is that of one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
ALIKE = {"rand_like": "rand", "randn_like": "randn", "randint_like": "randint"}
BY_PARAMETERS = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
"""Functions with parameters for each sample, which `torch.distributions` calls, too."""
IN_PLACE = ("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")


class Batch(Protocol):
    """The rows of the current training batch on this rank, and among those of all ranks.

    Attributes:
        rows: Number of rows on this rank, or None outside of a training step.
        num_groups: Number of groups of ranks that have different rows.
        num_joined: Number of batches of the other run that are joined to one.
    """

    rows: int | None
    num_groups: int
    group: int
    num_joined: int


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Sets the generators of Python, numpy and torch on the CPU, and restores their states at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


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
    makers: dict[str, Callable[[Batch, Any], Any]] = {
        **dict.fromkeys(("rand", "randn"), _factory),
        **{name: partial(_alike, factory=getattr(torch, drawn)) for name, drawn in ALIKE.items()},
        "randint": _randint,
        "normal": partial(_normal, factory=torch.randn),
        "bernoulli": partial(_bernoulli, factory=torch.rand),
        "randperm": _randperm,
        **dict.fromkeys(BY_PARAMETERS, partial(_by_parameters, factory=torch.randint)),
    }
    # The functions that others draw with are read above, before they are replaced.
    for name, make in makers.items():
        original = getattr(torch, name)
        setattr(torch, name, wraps(original)(make(batch, original)))
    for name in IN_PLACE:
        original = getattr(Tensor, name)
        setattr(Tensor, name, wraps(original)(_in_place(batch, original)))


def _has_rows(batch: Batch, size: Any, options: dict[str, Any]) -> bool:
    """Returns whether a tensor of this size has one row for each sample, from the default generator."""
    is_drawn = options.get("generator") is None and options.get("out") is None
    return is_drawn and batch.rows is not None and len(size) > 0 and size[0] == batch.rows


def _draw(
    batch: Batch, size: Any, make: Callable[[tuple[int, ...]], Tensor], requires_grad: bool = False
) -> Tensor:
    """Draws a tensor for the batch of all ranks, and returns the rows of this rank."""
    assert batch.rows is not None
    whole = make((batch.rows * batch.num_groups, *size[1:]))
    own = whole.narrow(0, batch.group * batch.rows, batch.rows).clone()
    return own.requires_grad_() if requires_grad else own


def _factory(batch: Batch, original: Callable[..., Any]) -> Any:
    def factory(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
        if not _has_rows(batch, size, kwargs):
            return original(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in ("size", "requires_grad")}
        return _draw(batch, size, partial(original, **options), kwargs.get("requires_grad", False))

    return factory


def _randint(batch: Batch, original: Callable[..., Any]) -> Any:
    def randint(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.get("size", args[-1] if args else ())
        if not (isinstance(size, (tuple, list)) and _has_rows(batch, size, kwargs)):
            return original(*args, **kwargs)
        bounds = args if "size" in kwargs else args[:-1]
        options = {name: value for name, value in kwargs.items() if name != "size"}
        return _draw(batch, size, lambda whole: original(*bounds, size=whole, **options))

    return randint


def _alike(batch: Batch, original: Callable[..., Any], factory: Callable[..., Any]) -> Any:
    def alike(input: Tensor, *args: Any, **kwargs: Any) -> Any:  # the name of torch's argument
        if type(input) is not Tensor or "high" in kwargs or not _has_rows(batch, input.shape, kwargs):
            return original(input, *args, **kwargs)
        options = {"dtype": input.dtype, "device": input.device, **kwargs}
        options.pop("memory_format", None)
        requires_grad = options.pop("requires_grad", False)
        bounds = (0, *args)[-2:] if args else ()  # of integers
        return _draw(batch, input.shape, lambda whole: factory(*bounds, whole, **options), requires_grad)

    return alike


def _normal(batch: Batch, original: Callable[..., Any], factory: Callable[..., Any]) -> Any:
    def normal(mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Any:
        like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
        size = kwargs.get("size", args[0] if args else ()) if like is None else like.shape
        if not _has_rows(batch, size, kwargs):
            return original(mean, std, *args, **kwargs)
        own = {} if like is None else {"dtype": like.dtype, "device": like.device}
        options = {**own, **{name: value for name, value in kwargs.items() if name != "size"}}
        return _draw(batch, size, lambda whole: factory(whole, **options)) * std + mean

    return normal


def _bernoulli(batch: Batch, original: Callable[..., Any], factory: Callable[..., Any]) -> Any:
    def bernoulli(input: Tensor, *args: Any, **kwargs: Any) -> Any:  # the name of torch's argument
        is_plain = type(input) is Tensor and not args and "p" not in kwargs
        if not is_plain or not _has_rows(batch, input.shape, kwargs):
            return original(input, *args, **kwargs)
        drawn = _draw(batch, input.shape, lambda whole: factory(whole, device=input.device))
        return (drawn < input).to(input.dtype)

    return bernoulli


def _randperm(batch: Batch, original: Callable[..., Any]) -> Any:
    def randperm(n: int, *args: Any, **kwargs: Any) -> Any:
        is_joined = batch.rows is not None and n == batch.rows and n % batch.num_joined == 0
        if batch.num_groups * batch.num_joined == 1 or not is_joined or not _has_rows(batch, (n,), kwargs):
            return original(n, *args, **kwargs)
        size = n // batch.num_joined  # each rank permutes its own rows
        drawn = [original(size, *args, **kwargs) for _ in range(batch.num_groups * batch.num_joined)]
        own = drawn[batch.group : batch.group + 1] if batch.num_joined == 1 else drawn
        return torch.cat([order + size * index for index, order in enumerate(own)])

    return randperm


def _by_parameters(batch: Batch, original: Callable[..., Any], factory: Callable[..., Any]) -> Any:
    def draw(*args: Any, **kwargs: Any) -> Any:
        parameters: Any = args[0] if args else kwargs.get("input")
        rows, has_rows = batch.rows or 0, type(parameters) is Tensor and parameters.ndim > 0
        if original.__name__ == "multinomial":  # one distribution has no row for each sample
            has_rows = has_rows and parameters.ndim == 2
        count = len(parameters) if has_rows else 0
        if not rows or not count or count % rows or kwargs.get("generator") or kwargs.get("out") is not None:
            return original(*args, **kwargs)
        seed = int(factory(2**60, ()))

        def part(value: Any, index: int) -> Any:
            has_part = isinstance(value, Tensor) and value.shape[:1] == parameters.shape[:1]
            return value[index : index + 1] if has_part else value

        # Each row has a generator of its own, because a rank does not know the parameters of the others.
        drawn = []
        for index in range(count):
            generator = torch.Generator(parameters.device).manual_seed(seed + batch.group * count + index)
            own = {name: part(value, index) for name, value in kwargs.items() if name != "generator"}
            drawn.append(original(*(part(value, index) for value in args), **own, generator=generator))
        return torch.cat(drawn)

    return draw


def _in_place(batch: Batch, original: Callable[..., Any]) -> Any:
    def fill(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not Tensor or not _has_rows(batch, self.shape, kwargs):
            return original(self, *args, **kwargs)
        with torch.no_grad():
            drawn = _draw(batch, self.shape, lambda whole: original(self.new_empty(whole), *args, **kwargs))
        return self.copy_(drawn)

    return fill
