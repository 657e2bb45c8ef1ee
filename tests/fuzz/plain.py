"""What a training loop means: plain torch on one process, with the joined batches of all ranks.

Programs run with these objects in place of those of the package. They are written as simply as possible and
use nothing of the package.

A window is the micro-batches of one optimizer step. A `step()` that is not the last one of its window keeps
the gradients that torch has at that call, and the last one adds those that were kept. If the loop calls
`step()` only in the last micro-batch, the gradients of the others are kept at their end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


def join_batches(
    samples: int, batch: int, world: int, *, split: bool = False, even: bool = True, drop_last: bool = False
) -> list[list[list[int]]]:
    """Samples of each rank in each joined batch of a sequential loader."""
    size = batch * world
    joined = [list(range(samples))[start : start + size] for start in range(0, samples, size)]
    if drop_last and len(joined[-1]) < size:
        joined.pop()
    if even and world > 1:
        joined = [part + [index % samples for index in range(size - len(part))] for part in joined]
    if split and not even:
        raise NotImplementedError
    return [[part[first : first + batch] for first in range(0, len(part), batch)] for part in joined]


def join(samples: Batch, parts: list[list[int]]) -> Batch:
    """The joined batch, whose last tensor is the share of each sample in the mean of the means of ranks."""
    indices = [index for part in parts for index in part]
    share = [1 / len(part) for part in parts for _ in part]
    joined = [tensor[indices] for tensor in samples[:-1]]
    return (*joined, torch.tensor(share, dtype=torch.float64)[:, None])


class Loader:
    """Batches, and whether the one that was read last is the last one."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches, self.ends = batches, False

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches, 1):
            self.ends = number == len(self.batches)
            yield batch


class Optimizer:
    """Optimizer of torch that steps once in a window, with the sum of the gradients."""

    def __init__(self, inner: torch.optim.Optimizer, plain: Plain) -> None:
        self.inner, self.plain = inner, plain
        self.kept: dict[Tensor, Tensor] = {}
        self.stepped = False  # in this micro-batch
        self.num_updates = 0
        self.add_param_group = inner.add_param_group
        self.zero_grad = inner.zero_grad

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def end_micro_batch(self) -> None:
        """Keep the gradients if the loop calls `step` only in the last micro-batch of a window."""
        if not self.stepped and not self.plain.sync_gradients:
            self.keep()

    def keep(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                self.kept[parameter] = self.kept.get(parameter, 0) + parameter.grad
                parameter.grad = None

    def join(self) -> None:
        self.keep()
        for parameter, gradient in self.kept.items():
            parameter.grad = gradient
        self.kept = {}

    def drop(self) -> None:
        self.kept = {}
        self.inner.zero_grad()

    def scale(self, factor: float) -> None:
        self.kept = {parameter: gradient * factor for parameter, gradient in self.kept.items()}

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if isinstance(self.inner, torch.optim.LBFGS):
            self.num_updates += 1
            return self.inner.step(closure)  # type: ignore
        loss = closure() if closure else None
        self.stepped = True
        if not self.plain.sync_gradients:
            self.keep()
        else:
            self.join()
            self.inner.step()
            self.num_updates += 1
        return loss


class Scheduler:
    """Scheduler that steps once for each rank and update, because it was written for batches of one rank.

    Args:
        inner: Scheduler of torch.
        plain: Methods of an accelerator.
        steps: Number of steps for each update, or None if each call is a step, such as one for each epoch.
    """

    def __init__(self, inner: Any, plain: Plain, steps: int | None) -> None:
        self.inner, self.plain, self.steps = inner, plain, steps

    def step(self, *metric: float) -> None:
        if metric or self.steps is None:
            self.inner.step(*metric)
        elif self.plain.sync_gradients:
            for _ in range(self.steps):
                self.inner.step()


@dataclass
class Window:
    position: int = 0
    steps: int = 1
    items: float = 0.0


class Plain:
    """The methods of an `Accelerator` that the programs call.

    Args:
        steps: Micro-batches of a window.
        ends_with_loader: Whether the last batch of `driver` ends a window.
    """

    driver: Loader

    def __init__(self, steps: int, ends_with_loader: bool) -> None:
        self.gradient_accumulation_steps, self.ends_with_loader = steps, ends_with_loader
        self.sync_gradients, self.weight = True, 1.0
        self.open: dict[frozenset[nn.Module], Window] = {}
        self.optimizers: list[Optimizer] = []
        self.objects: list[Any] = []  # models, inner optimizers and schedulers
        self.saved: Any = None

    def optimizers_of(self, models: Iterable[nn.Module]) -> list[Optimizer]:
        own = {id(parameter) for model in models for parameter in model.parameters()}
        return [one for one in self.optimizers if any(id(parameter) in own for parameter in one.parameters())]

    @contextmanager
    def accumulate(self, *models: nn.Module, num_items: Tensor | None = None) -> Iterator[None]:
        window = self.open.setdefault(frozenset(models), Window())
        is_first = window.position == 0
        if is_first:
            window.steps, window.items = self.gradient_accumulation_steps, 0.0
        window.position += 1
        is_last = window.position == window.steps or (self.ends_with_loader and self.driver.ends)
        self.sync_gradients, self.weight = is_last, 1 / window.steps
        if num_items is not None:
            window.items += float(num_items)
            self.weight = 1 / window.items if is_last else 1.0
            for optimizer in self.optimizers_of(models):
                optimizer.scale(self.weight)
        if is_last:
            window.position = 0
        for optimizer in self.optimizers_of(models):
            optimizer.stepped = False
        yield
        for optimizer in self.optimizers_of(models):
            optimizer.end_micro_batch()

    def windows(
        self, loader: Loader, *models: nn.Module, num_items: Callable[[Batch], Tensor] | None = None
    ) -> Iterator[Iterator[Batch]]:
        batches = loader.batches
        while batches:
            window = batches[: self.gradient_accumulation_steps]
            batches = batches[len(window) :]
            total = sum(float(num_items(batch)) for batch in window) if num_items else len(window)
            yield self.window(window, total)
            if not self.sync_gradients:  # the loop has left the window
                for optimizer in self.optimizers:
                    optimizer.drop()
        self.sync_gradients = True

    def window(self, batches: list[Batch], total: float) -> Iterator[Batch]:
        self.weight = 1 / total
        for number, batch in enumerate(batches, 1):
            self.sync_gradients = number == len(batches)
            for optimizer in self.optimizers:
                optimizer.stepped = False
            yield batch
            for optimizer in self.optimizers:
                optimizer.end_micro_batch()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        (loss * self.weight).backward(**options)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: Iterable[Tensor], norm: float) -> None:
        self.clip(torch.nn.utils.clip_grad_norm_, parameters, norm)

    def clip_grad_value_(self, parameters: Iterable[Tensor], value: float) -> None:
        self.clip(torch.nn.utils.clip_grad_value_, parameters, value)

    def clip(self, clip: Callable[..., Any], parameters: Iterable[Tensor], limit: float) -> None:
        if not self.sync_gradients:
            return
        clipped = list(parameters)
        for optimizer in self.optimizers:
            if any(parameter is one for parameter in optimizer.parameters() for one in clipped):
                optimizer.join()
        clip(clipped, limit)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor

    def gather_for_metrics(self, tensor: Tensor) -> Tensor:
        return tensor

    def save_state(self, folder: str) -> None:
        counts = [optimizer.num_updates for optimizer in self.optimizers]
        self.saved = copy.deepcopy(([each.state_dict() for each in self.objects], counts))

    def load_state(self, folder: str) -> None:
        states, counts = copy.deepcopy(self.saved)
        for each, state in zip(self.objects, states, strict=True):
            each.load_state_dict(state)
        for optimizer, count in zip(self.optimizers, counts, strict=True):
            optimizer.num_updates = count
