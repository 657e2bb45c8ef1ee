"""Replacement of methods of the package, in the process of a script whose training is recorded."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from itertools import cycle, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate import data_loader, torch_private
from accelerate.accelerator import Accelerator, Accumulation, ItemWeighting
from accelerate.base import ConfigurationError, environ
from accelerate.plugins import ActivationCheckpointing, DataLoaderConfiguration, ProjectConfiguration
from accelerate.recovery import Recovery, RecoveryLoader
from accelerate.state import services
from accelerate.verification.options import SEED
from accelerate.verification.recorder import Recorder

if TYPE_CHECKING:
    import torch

LAYOUT_ARGUMENTS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
    *("dynamo_backend", "dynamo_plugin", "parallelism_config"),
)
"""Arguments of `Accelerator` that a run on one process leaves out."""
LAYOUT_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_DYNAMO_BACKEND",
)
"""Variables with which a script requests a layout itself."""


def install(recorder: Recorder) -> None:
    """Replaces the methods that the recorder observes."""
    _observe_accelerator(recorder)
    _observe_losses(recorder)
    for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher, RecoveryLoader):
        _observe_loader(recorder, kind)
    _observe_replica_groups(recorder)
    if recorder.options.factor > 1:
        _enlarge_batches(recorder)
    _redirect_saves(recorder)


def _replace(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a method by the result of a function of it."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


def _observe_accelerator(recorder: Recorder) -> None:
    signature = inspect.signature(Accelerator.__init__)

    def begin(original: Callable[..., Any]) -> Any:
        def initialize(self: Accelerator, *args: Any, **kwargs: Any) -> None:
            given = dict(signature.bind(self, *args, **kwargs).arguments)
            del given["self"]
            project = given.pop("project_config", None) or ProjectConfiguration()
            project.project_dir = str(recorder.redirected)
            project.logging_dir = str(recorder.redirected)
            given |= {"project_config": project, "project_dir": None, "log_with": None}
            given["dataloader_config"] = _with_seed(given.get("dataloader_config"))
            if recorder.options.is_reference:
                given = _without_layout(given)
            original(self, **given)
            recorder.use(self)
            if recorder.has_enlarged and _divides_batches(self):
                raise ConfigurationError(
                    "The script creates a loader before its Accelerator, whose batches are divided among the "
                    "ranks (split_batches or global_batch_size). Create the Accelerator first, so that "
                    "accelerate verify knows the size of a batch."
                )

        return initialize

    def prepare(original: Callable[..., Any]) -> Any:
        def prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
            if not recorder.options.keeps_dropout:
                for obj in args:
                    if isinstance(obj, nn.Module):
                        torch_private.turn_off_dropout_of(obj)
            return original(self, *args, **kwargs)

        return prepare

    _replace(Accelerator, "__init__", begin)
    _replace(Accelerator, "prepare", prepare)
    _replace(Accelerator, "prepare_model", prepare)


def _with_seed(config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """Returns a configuration whose order of samples does not depend on the random numbers of the script."""
    config = DataLoaderConfiguration() if config is None else config
    seed = SEED if config.data_seed is None else config.data_seed
    return replace(config, use_seedable_sampler=True, data_seed=seed)


def _without_layout(given: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `Accelerator` without those that shard, split, compile or recompute."""
    for name in LAYOUT_VARIABLES:
        environ.unset(name)
    handlers = [
        handler
        for handler in given.get("kwargs_handlers") or ()
        if not isinstance(handler, ActivationCheckpointing)
    ]
    rest = {name: value for name, value in given.items() if name not in LAYOUT_ARGUMENTS}
    return {**rest, "kwargs_handlers": handlers}


def _observe_losses(recorder: Recorder) -> None:
    def backward(original: Callable[..., Any]) -> Any:
        def backward(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
            if recorder.is_in_pipeline:
                original(self, loss, **kwargs)
                return
            recorder.begin_backward()
            value = float(loss.detach())
            original(self, loss, **kwargs)
            recorder.end_backward(value, _items_of(self._accumulation), 1.0)

        return backward

    def forward_backward(original: Callable[..., Any]) -> Any:
        def forward_backward(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
            if not any(layer.divides_models for layer in self._runtime.strategy.layers):
                return original(self, *args, **kwargs)
            recorder.begin_backward()
            recorder.is_in_pipeline = True
            try:
                loss = original(self, *args, **kwargs)
            finally:
                recorder.is_in_pipeline = False
            items, steps = _items_of(self._accumulation), self.gradient_state.num_steps
            recorder.scaled = None
            recorder.end_backward(float(loss), items, 1.0 / steps)
            return loss

        return forward_backward

    def scale(original: Callable[..., Any]) -> Any:
        def scale(self: Accumulation, loss: torch.Tensor) -> Any:
            scaled = original(self, loss)
            recorder.scaled = float(scaled.detach())
            return scaled

        return scale

    _replace(Accelerator, "backward", backward)
    _replace(Accelerator, "forward_backward", forward_backward)
    _replace(Accumulation, "scale", scale)


def _items_of(accumulation: Accumulation) -> float | None:
    """Returns the number of items of the current micro-batch, or None for a loss that is a mean."""
    weighting = accumulation.weighting
    return weighting.last_items if isinstance(weighting, ItemWeighting) else None


def _observe_loader(recorder: Recorder, kind: object) -> None:
    def iterate(original: Callable[..., Any]) -> Any:
        def read(self: Any) -> Any:
            batches = original(self)
            # Replica groups read prepared loaders through another one.
            is_part = kind is not RecoveryLoader and services.find(Recovery) is not None
            return batches if is_part else recorder.read(self, batches)

        return read

    _replace(kind, "__iter__", iterate)


def _observe_replica_groups(recorder: Recorder) -> None:
    def begin(original: Callable[..., Any]) -> Any:
        def begin_micro_batch(self: Recovery, number: tuple[int, int, int], **values: Any) -> None:
            original(self, number, **values)
            recorder.micro_batch = number

        return begin_micro_batch

    _replace(Recovery, "begin_micro_batch", begin)


def _enlarge_batches(recorder: Recorder) -> None:
    """Multiplies the batch sizes of all loaders that the script creates."""
    factor, signature = recorder.options.factor, inspect.signature(DataLoader.__init__)
    preparing: list[Any] = []  # a prepared loader creates a loader of torch

    def prepare(original: Callable[..., Any]) -> Any:
        def initialize(self: object, *args: Any, **kwargs: Any) -> None:
            preparing.append(self)
            try:
                original(self, *args, **kwargs)
            finally:
                preparing.pop()

        return initialize

    def create(original: Callable[..., Any]) -> Any:
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            accelerator = recorder.accelerator
            if preparing or (accelerator is not None and _divides_batches(accelerator)):
                original(self, *args, **kwargs)
                return
            given = signature.bind(self, *args, **kwargs).arguments
            values = {name: value for name, value in given.items() if name != "self"}
            if (sampler := values.get("batch_sampler")) is not None:
                values["batch_sampler"] = _JoinedBatches(sampler, factor, recorder)
            elif values.get("batch_size", 1) is not None:
                values["batch_size"] = values.get("batch_size", 1) * factor
            original(self, **values)
            recorder.has_enlarged = accelerator is None
            is_filled = type(self.batch_sampler) is BatchSampler and not self.drop_last
            if is_filled and not isinstance(self.dataset, IterableDataset):
                filled = _FilledBatches(self.sampler, self.batch_size, False)
                filled.recorder = recorder
                object.__setattr__(self, "batch_sampler", filled)

        return initialize

    def order(original: Callable[..., Any]) -> Any:
        def shard_order(loader: Any, index_sampler: Any, plan: object, num_processes: int) -> Any:
            if num_processes == 1:  # samplers draw their order as on several ranks
                index_sampler, _ = data_loader.synchronize_order(loader, index_sampler, num_processes)
            return original(loader, index_sampler, plan, num_processes)

        return shard_order

    _replace(data_loader.DataLoaderAdapter, "__init__", prepare)
    _replace(DataLoader, "__init__", create)
    _replace(import_module("accelerate.data_loader.prepare"), "shard_order", order)


def _divides_batches(accelerator: Accelerator) -> bool:
    """Returns whether the batch size of a loader is that of all ranks."""
    return accelerator.split_batches or accelerator.gradient_state.global_batch_size is not None


def _fills(recorder: Recorder) -> bool:
    """Returns whether several ranks would fill the last batch of a pass with samples from its beginning.

    Several ranks of this run do so themselves.
    """
    accelerator = recorder.accelerator
    is_alone = accelerator is None or (accelerator.even_batches and accelerator.num_processes == 1)
    return recorder.is_training and is_alone


class _FilledBatches(BatchSampler):
    """Batches of which the last one is filled as those of several ranks are."""

    recorder: Recorder

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        for batch in super().__iter__():
            first += batch[: self.batch_size - len(first)]
            if len(batch) < self.batch_size and _fills(self.recorder):
                batch = [*batch, *islice(cycle(first), self.batch_size - len(batch))]
            yield batch


class _JoinedBatches:
    """Batches of a sampler of the script, of which several are joined to one."""

    def __init__(self, sampler: BatchSampler, factor: int, recorder: Recorder) -> None:
        self.sampler, self.factor, self.recorder = sampler, factor, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    @property
    def batch_size(self) -> int | None:
        size = getattr(self.sampler, "batch_size", None)
        return size * self.factor if isinstance(size, int) else None

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.factor)

    def __iter__(self) -> Iterator[list[Any]]:
        batches, first = iter(self.sampler), list[Any]()
        while joined := list(islice(batches, self.factor)):
            first += joined[: self.factor - len(first)]
            if len(joined) < self.factor and _fills(self.recorder):
                joined += islice(cycle(first), self.factor - len(joined))
            yield [index for batch in joined for index in batch]


def _redirect_trainer(recorder: Recorder, module: ModuleType) -> None:
    """Lets the Trainer of transformers save into a temporary folder."""

    def prepare(original: Callable[..., Any]) -> Any:
        def __post_init__(self: Any) -> None:  # noqa: N807
            self.output_dir = str(recorder.redirected / "trainer")
            original(self)

        return __post_init__

    _replace(module.TrainingArguments, "__post_init__", prepare)


class _AfterImport(MetaPathFinder):
    """Finder that calls a function with a module after its import."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _redirect_saves(recorder: Recorder) -> None:
    """Lets the script save into a temporary folder, and load from there what it has saved."""
    saved: dict[str, str] = {}

    def target(path: str) -> str:
        key = os.path.abspath(path)
        return saved.setdefault(key, str(recorder.redirected / f"{len(saved)}" / os.path.basename(key)))

    def redirect(owner: object, method: str, name: str, *, only_saved: bool = False) -> None:
        signature = inspect.signature(getattr(owner, method))

        def make(original: Callable[..., Any]) -> Any:
            def redirected(self: object, *args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(self, *args, **kwargs)
                path = bound.arguments.get(name)
                if path is not None and (not only_saved or os.path.abspath(path) in saved):
                    bound.arguments[name] = target(path)
                    os.makedirs(os.path.dirname(bound.arguments[name]), exist_ok=True)
                return original(*bound.args, **bound.kwargs)

            return redirected

        _replace(owner, method, make)

    sys.meta_path.insert(0, _AfterImport("transformers.training_args", partial(_redirect_trainer, recorder)))
    redirect(Accelerator, "save_state", "output_dir")
    redirect(Accelerator, "load_state", "input_dir", only_saved=True)
    redirect(Accelerator, "save_model", "save_directory")
    redirect(Accelerator, "save", "f")

    def release(original: Callable[..., Any]) -> Any:
        def release(self: Accelerator, *args: Any) -> Any:
            recorder.free(self)
            return original(self, *args)

        return release

    _replace(Accelerator, "end_training", release)
    _replace(Accelerator, "free_memory", release)
