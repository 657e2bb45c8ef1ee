"""Data for Megatron-LM: the user's loaders, or its own datasets behind a loader that stands for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import wrong_value
from accelerate.data_loader import kept_settings
from accelerate.state import AcceleratorState
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.datasets import build_datasets

_RENAMED = {"splits_string": "split"}
"""What scripts call an argument of Megatron-LM otherwise."""

_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


class MegatronLMDummyDataLoader:
    """Stands for data that Megatron-LM reads itself: passed three times, for training, validation and test.

    Args:
        **dataset_kwargs: arguments of Megatron-LM about data: `data_path`, `splits_string`, `seq_length`,
            `micro_batch_size`, and any others.

    Attributes:
        dataset_args: those arguments.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dict(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """Hand the arguments to the plugin of the run."""
        plugin = AcceleratorState().megatron_lm_plugin
        found = {_RENAMED.get(name, name): value for name, value in self.dataset_args.items()}
        found.update({name: [found[name]] for name in _LISTS if isinstance(found.get(name), str)})
        if found.get("seq_length") is not None:
            plugin.seq_length = found["seq_length"]
        plugin.dataset_args = found
        plugin.megatron_lm_default_args.update(found, megatron_dataset_flag=True)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function that builds the three datasets.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        custom: Callable[..., Any] | None = (
            accelerator.state.megatron_lm_plugin.custom_megatron_datasets_provider_function
        )
        provider: Any = custom or build_datasets
        provider.is_distributed = True  # Megatron-LM asks for it
        return provider  # type: ignore[no-any-return]

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Return what training, validation and test read; None where this process reads nothing.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        args = library.get_args()
        for name, place in (("consumed_train_samples", 0), ("consumed_valid_samples", 1)):
            read = (getattr(args, "consumed_samples", None) or [0, 0, 0])[place]
            setattr(args, name, getattr(args, name, 0) or read)
        train, valid, test = library.training("training").build_train_valid_test_data_iterators(provider)
        return train, valid, test


class MegatronBatches:
    """Batches of Megatron-LM's datasets, each with the micro-batches of one step.

    Args:
        source: an iterator of micro-batches, or None where this process reads none: then batches are empty,
            and the engine fetches them from the rank that reads.
        num_micro_batches: micro-batches of a step.
    """

    _is_accelerate_prepared = True

    def __init__(self, source: Iterator[Mapping[str, Any]] | None, num_micro_batches: int) -> None:
        self.source = source
        self.num_micro_batches = num_micro_batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.source is None:
            return {}
        batches = [next(self.source) for _ in range(self.num_micro_batches)]
        names = [name for name, value in batches[0].items() if isinstance(value, torch.Tensor)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in names}


class RankGrid:
    """Where this process stands among those that Megatron-LM has grouped, as loaders ask for it.

    It has the part of `torch.distributed.DeviceMesh` that says which ranks share a batch; a mesh would open
    the same groups a second time.
    """

    mesh_dim_names = ("pp", "dp", "cp", "tp")

    def __init__(self) -> None:
        groups = library.core("parallel_state")
        self._sizes = (
            groups.get_pipeline_model_parallel_world_size(),
            groups.get_data_parallel_world_size(),
            groups.get_context_parallel_world_size(),
            groups.get_tensor_model_parallel_world_size(),
        )
        self._place = [
            groups.get_pipeline_model_parallel_rank(),
            groups.get_data_parallel_rank(),
            groups.get_context_parallel_rank(),
            groups.get_tensor_model_parallel_rank(),
        ]
        self.mesh = torch.empty(self._sizes, dtype=torch.int8)

    def size(self) -> int:
        """Number of processes."""
        return self.mesh.numel()

    def get_coordinate(self) -> list[int]:
        """Place of this process on each axis."""
        return self._place


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Return a loader whose batches are those of one step, shared out between copies of the model.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        dataloader: torch's, or one that stands for Megatron-LM's data.

    Returns:
        A prepared loader; three of them, for training, validation and test, for one that stands for
        Megatron-LM's data.
    """
    if not isinstance(dataloader, MegatronLMDummyDataLoader):
        return accelerator.prepare_data_loader(dataloader)
    number = int(accelerator.state.megatron_lm_plugin.num_micro_batches)
    sources = dataloader.build_train_valid_test_data_iterators(accelerator)
    return tuple(MegatronBatches(source, number) for source in sources)


def with_batches_of(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader like another one, with larger batches.

    Args:
        loader: the user's.
        size: samples of a batch.

    Raises:
        ConfigurationError: its batches are made by a batch sampler of the user's own.
    """
    if loader.batch_size == size:
        return loader
    refuse_batch_sampler(loader)
    settings = kept_settings(loader)
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **settings)
    return DataLoader(
        loader.dataset, batch_size=size, sampler=loader.sampler, drop_last=loader.drop_last, **settings
    )


def refuse_batch_sampler(loader: DataLoader[Any]) -> None:
    """Raise where a batch sampler of the user's own makes the batches.

    Args:
        loader: the user's.
    """
    if loader.batch_size is None:
        raise wrong_value(
            "batch_size",
            None,
            "this loader does not say how many samples its batches have, and a step takes "
            "num_micro_batches micro-batches of one size",
            "Build the loader with batch_size and a sampler",
        )
