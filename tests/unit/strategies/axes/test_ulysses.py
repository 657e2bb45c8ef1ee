"""Sequences that are sharded by DeepSpeed's attention, which recording stand-ins replace."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accelerate.base import PreparationError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.axes import UlyssesAxis, check_attention, loader_class


def model(**config):
    return SimpleNamespace(config=SimpleNamespace(**config), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (SimpleNamespace(), "has no `config`"),
        (model(_attn_implementation="eager"), "computes attention by 'eager'"),
        (model(_attn_implementation="sdpa", num_attention_heads=3), "3 attention heads"),
    ],
)
def test_attention_that_cannot_be_shared_is_refused(given, reason):
    with pytest.raises(PreparationError, match=reason):
        check_attention(given, 2, "sdpa")


@pytest.fixture
def deepspeed(monkeypatch):
    asked = []
    groups = SimpleNamespace(
        get_sequence_parallel_rank=lambda: 1,
        get_sequence_parallel_group=lambda: "group",
        get_sequence_parallel_world_size=lambda: 2,
    )

    class UlyssesSPAttentionHF:
        @staticmethod
        def register_with_transformers(**given):
            asked.append(given)
            return groups

    class UlyssesSPDataLoaderAdapter:
        def __init__(self, dl, **given):
            self.dl, self.micro_batches = dl, []
            self.device = given["device"]
            self.iter = iter(dl)
            asked.append(given)

        def __iter__(self):
            return self

        def __next__(self):
            if not self.micro_batches:
                self.refill()
            return self.micro_batches.pop(0)

        def refill(self):
            batch = next(self.iter)
            self.micro_batches = [batch, batch]

    module = ModuleType("ulysses_sp")
    module.UlyssesSPAttentionHF = UlyssesSPAttentionHF
    module.UlyssesSPDataLoaderAdapter = UlyssesSPDataLoaderAdapter
    name = "deepspeed.runtime.sequence_parallel"
    for each in ("deepspeed", "deepspeed.runtime", name):
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    monkeypatch.setitem(sys.modules, f"{name}.ulysses_sp", module)
    loader_class.cache_clear()
    yield asked
    loader_class.cache_clear()


class Loader:
    """Ends with its second batch, and sets `end_of_dataloader` for it."""

    end_of_dataloader = False

    def __iter__(self):
        for index in range(2):
            self.end_of_dataloader = index == 1
            yield {"input_ids": torch.full((1, 2), index)}


def test_attention_is_registered_and_loaders_are_divided(deepspeed):
    request = SimpleNamespace(parallelism=ParallelismConfig(sp_size=2, dp_shard_size=1))
    shared = UlyssesAxis(SimpleNamespace(context=SimpleNamespace(request=request)))
    given = model(_attn_implementation="sdpa", num_attention_heads=4)
    with pytest.raises(PreparationError, match="prepare the model first"):
        shared.transform_loader(Loader(), given)
    assert shared.transform_model(given, 3) is given
    assert shared.groups.get_sequence_parallel_rank() == 1
    assert deepspeed[0] == {
        "model_name_or_path": given,
        "core_attn_implementation": "sdpa",
        "sequence_parallel_size": 2,
        "micro_batch_size": 3,
        "seq_length": None,
        "seq_length_is_variable": True,
    }
    with pytest.raises(PreparationError, match="second model"):
        shared.transform_model(given)
    loader = Loader()
    divided = shared.transform_loader(loader, given)
    assert deepspeed[1] == {
        "sp_rank": 1,
        "sp_group": "group",
        "sp_world_size": 2,
        "device": torch.device("cpu"),
    }
    ends = []
    for _ in divided:
        ends.append(loader.end_of_dataloader)
    assert ends == [False, False, False, True]
