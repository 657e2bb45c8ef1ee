"""Training mistakes are found when objects are prepared."""

from __future__ import annotations

import copy
import io
import itertools
from collections import UserDict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accelerate import Accelerator
from accelerate.strategies import find_unrelated_optimizers, find_unstepped_models
from accelerate.strategies.session import find_held_loaders


def test_a_parameter_that_no_optimizer_owns_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    (warning,) = find_unstepped_models([model], [torch.optim.SGD([model.weight], lr=1.0)])
    assert "1 trainable parameters of Linear" in warning
    assert ": bias." in warning
    assert "requires_grad_(False)" in warning


def test_frozen_parameters_and_whole_optimizers_are_fine() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    assert find_unstepped_models([model], [optimizer]) == []
    assert find_unrelated_optimizers([optimizer], [model]) == []


def test_long_lists_are_cut() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(4)])
    (warning,) = find_unstepped_models([model], [])
    assert "0.weight, 0.bias, 1.weight, 1.bias, 2.weight and 3 more" in warning


def test_an_optimizer_of_no_prepared_model_is_named() -> None:
    stale = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    (warning,) = find_unrelated_optimizers([stale], [torch.nn.Linear(2, 2)])
    assert warning.startswith("SGD steps no parameter of any prepared model")


class Hiding(torch.nn.Module):
    """A generator whose discriminator is a submodule with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)


class HidingParameters(Hiding):
    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.generator.parameters(recurse)


class HidingNames(Hiding):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.generator.named_parameters(*args, **kwargs)


class HidingModules(Hiding):
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.generator.named_modules(*args, **kwargs)


@pytest.mark.parametrize("kind", [HidingParameters, HidingNames, HidingModules])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_optimizer_of_a_submodule_that_the_model_hides_is_related(
    kind: type[Hiding], is_wrapped: bool
) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.discriminator.parameters(), lr=1.0)
    assert find_unrelated_optimizers([optimizer], [torch.nn.Sequential(model) if is_wrapped else model]) == []


def test_on_one_process_an_optimizer_may_step_what_no_model_has() -> None:
    """For example an image or an embedding that is optimized through a frozen model."""
    frozen, code = torch.nn.Linear(2, 2).requires_grad_(False), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([code], lr=1.0)
    assert find_unrelated_optimizers([optimizer], [frozen], {id(code)}) == []
    (warning,) = find_unrelated_optimizers([optimizer], [frozen])  # several processes
    assert warning.startswith("SGD steps no parameter")


def test_the_optimizer_of_a_copy_is_named_where_the_model_is_not_stepped() -> None:
    model = HidingParameters()
    other = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=1.0)
    stepped = {id(p) for p in other.param_groups[0]["params"]}
    (warning,) = find_unrelated_optimizers([other], [model], stepped)
    assert warning.startswith("SGD steps no parameter")


def test_an_optimizer_without_parameters_yet_is_not_named() -> None:
    optimizer = torch.optim.SGD([{"params": []}], lr=1.0)
    assert find_unrelated_optimizers([optimizer], [torch.nn.Linear(2, 2)]) == []


GLOBAL_LOADER = DataLoader(range(4))


def read_global() -> Iterator[Any]:
    for batch in GLOBAL_LOADER:
        yield batch + 1


def read(loader: Any) -> Iterator[Any]:
    yield from loader


class Prefetched:
    """Iterable of another library that reads a loader."""

    def __init__(self, loader: Any) -> None:
        self.source = {"loader": loader}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source["loader"])


class Slotted:
    """Iterator without a dict."""

    __slots__ = ("loader",)

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __next__(self) -> Any:
        return next(iter(self.loader))


class Tokenizer:
    """Object that is no iterable, with a loader that it may use otherwise."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader


class Stream(IterableDataset[int]):
    """Dataset that knows its rank."""

    rank, world_size = 1, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def started(generator: Iterator[Any]) -> Iterator[Any]:
    next(generator)
    return generator


HOLDERS = {
    "generator": read,
    "started generator": lambda loader: started(read(loader)),
    "generator expression": lambda loader: (batch for batch in loader),
    "cycle": itertools.cycle,
    "zip": lambda loader: zip(range(4), loader, strict=True),
    "enumerate": enumerate,
    "map and islice": lambda loader: itertools.islice(map(str, loader), 2),
    "chain": lambda loader: itertools.chain(range(2), loader),
    "tqdm": lambda loader: pytest.importorskip("tqdm").tqdm(loader, disable=True),
    "shown tqdm": lambda loader: pytest.importorskip("tqdm").tqdm(loader, file=io.StringIO()),
    "enumerated tqdm": lambda loader: enumerate(pytest.importorskip("tqdm").tqdm(loader, disable=True)),
    "list": lambda loader: [loader],
    "tuple": lambda loader: (1, (2, loader)),
    "dict": lambda loader: {"train": loader},
    "user dict": lambda loader: UserDict(train=loader),
    "deque": lambda loader: deque([loader]),
    "iterator": iter,
    "list of iterators": lambda loader: [iter(loader)],
    "iterable of a class": Prefetched,
    "iterator with slots": Slotted,
}


@pytest.mark.usefixtures("states")
def test_loaders_in_objects_that_are_not_prepared_are_named() -> None:
    prepared = Accelerator(cpu=True).prepare(DataLoader(range(4)))
    failures = []
    for name, hold in HOLDERS.items():
        if len(find_held_loaders([hold(DataLoader(range(4)))])) != 1:
            failures.append(name)
        if find_held_loaders([hold(prepared)]):
            failures.append(f"prepared in {name}")
        if find_held_loaders([hold(range(4))]):
            failures.append(f"range in {name}")
    assert not failures
    (warning,) = find_held_loaders([read_global(), [DataLoader(range(4))], [1]])
    assert "objects of type generator, list unchanged" in warning
    assert find_held_loaders([zip(prepared, DataLoader(range(4)), strict=True)])


def test_objects_without_a_loader_of_all_ranks_are_fine() -> None:
    sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    loop: list[Any] = [1]
    loop.append(loop)
    for obj in (
        [1, 2, 3],
        list(range(100_000)),
        {"a": "b"},
        "text",
        None,
        torch.ones(2),
        loop,
        [torch.nn.Linear(1, 1)],
        Tokenizer(DataLoader(range(4))),
        lambda: DataLoader(range(4)),
        DataLoader,
        itertools.count(),
        range(4),
        [DataLoader(range(4), sampler=sampler)],
        iter(DataLoader(range(4), sampler=sampler)),
        [DataLoader(Stream())],
    ):
        assert find_held_loaders([obj]) == []
