"""Loaders give the batches of whole steps, and data of Megatron-LM are read through the same loader."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.strategies.megatron import (
    MegatronLMDummyDataLoader,
    RankGrid,
    build_datasets,
    prepare_data_loader,
    refuse_batch_sampler,
    with_batch_size,
)
from accelerate.utils import MegatronLMPlugin

from .conftest import Fake, Start, samples


def test_larger_batches_of_the_same_samples() -> None:
    loader = DataLoader(range(8), batch_size=2, shuffle=True, drop_last=True, collate_fn=list)  # type: ignore[arg-type]
    larger = with_batch_size(loader, 4)
    assert larger.sampler is loader.sampler
    assert (larger.collate_fn, larger.drop_last, len(larger)) == (list, True, 2)
    assert sorted(sum(larger, [])) == list(range(8))
    assert with_batch_size(loader, 2) is loader


def test_a_stream_is_read_in_larger_batches() -> None:
    loader: DataLoader[Any] = DataLoader(Stream(8), batch_size=2, collate_fn=list)
    assert [len(batch) for batch in with_batch_size(loader, 3)] == [3, 3, 2]


def test_batches_without_a_size_are_refused() -> None:
    loader: DataLoader[Any] = DataLoader(range(4), batch_sampler=[[0], [1]])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        refuse_batch_sampler(loader)


def test_the_rank_grid_gives_the_data_parallel_groups(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.data_loader import data_groups

    fake.sizes.update(tensor=2, pipeline=2, data=3)
    groups: Any = sys.modules["megatron.core.parallel_state"]
    monkeypatch.setattr(groups, "get_data_parallel_rank", lambda: 2)
    monkeypatch.setattr(groups, "get_tensor_model_parallel_rank", lambda: 1)
    grid = RankGrid()
    assert (grid.size(), grid.get_coordinate()) == (12, [0, 2, 0, 1])
    assert data_groups(grid, 12, 5) == (3, 2)


def test_arguments_of_the_dummy_loader_are_set_on_the_plugin(fake: Fake) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    data = MegatronLMDummyDataLoader(
        data_path="a", train_data_path=["b"], splits_string="9,1,0", seq_length=5
    )
    data.set_megatron_data_args()
    plugin = accelerator.state.megatron_lm_plugin
    assert plugin.seq_length == 5
    expected = {"data_path": ["a"], "train_data_path": ["b"], "split": "9,1,0", "megatron_dataset_flag": True}
    assert expected.items() <= plugin.megatron_lm_default_args.items()


@pytest.mark.parametrize("own", [True, False])
def test_the_provider_of_datasets_is_that_of_the_user_or_the_default(fake: Fake, own: bool) -> None:
    def provider(numbers: list[int]) -> None: ...

    plugin = MegatronLMPlugin(custom_megatron_datasets_provider_function=provider if own else None)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    found: Any = MegatronLMDummyDataLoader().get_train_valid_test_datasets_provider(accelerator)
    assert found is (provider if own else build_datasets)
    assert found.is_distributed


def test_consumed_samples_are_set_for_megatron(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    training: Any = sys.modules["megatron.training.training"]
    monkeypatch.setattr(
        training,
        "build_train_valid_test_data_iterators",
        lambda provider: [provider, None, None],
        raising=False,
    )
    fake.args = Namespace(consumed_samples=[5, 6, 7], consumed_train_samples=0)
    plugin = Namespace(custom_megatron_datasets_provider_function=None, num_micro_batches=2)
    accelerator = Namespace(state=Namespace(megatron_lm_plugin=plugin))
    train, valid, _ = prepare_data_loader(accelerator, MegatronLMDummyDataLoader())
    assert (fake.args.consumed_train_samples, fake.args.consumed_valid_samples) == (5, 6)
    assert train.source is build_datasets
    assert valid.source is None


def test_torchs_loaders_are_prepared(start: Start) -> None:
    accelerator, *_ = start(num_micro_batches=2)
    loader = prepare_data_loader(accelerator, DataLoader(samples(), batch_size=2))
    assert [len(batch["input_ids"]) for batch in loader] == [4, 4]
