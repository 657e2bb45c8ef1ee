"""The datasets of `megatron.core` are described by Megatron-LM's arguments."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.strategies.megatron import build_datasets

from .conftest import Fake

ARGUMENTS = {
    "seed": 3,
    "seq_length": 8,
    "encoder_seq_length": 6,
    "decoder_seq_length": 4,
    "data_path": ["text"],
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "split": "9,1,0",
    "data_cache_path": None,
    "reset_position_ids": True,
    "reset_attention_mask": False,
    "eod_mask_loss": True,
    "mask_prob": 0.2,
    "short_seq_prob": 0.1,
    "bert_binary_head": True,
}

KINDS = {
    "gpt": ("gpt_dataset", "GPTDataset", "GPTDatasetConfig"),
    "bert": ("bert_dataset", "BERTMaskedWordPieceDataset", "BERTMaskedWordPieceDatasetConfig"),
    "t5": ("t5_dataset", "T5MaskedWordPieceDataset", "T5MaskedWordPieceDatasetConfig"),
}


class Builder:
    def __init__(self, kind: Any, numbers: list[int], reads: Any, config: Any) -> None:
        self.given = (kind, numbers, reads(), config)

    def build(self) -> Any:
        return self.given


@pytest.fixture
def datasets(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    content: dict[str, dict[str, Any]] = {
        "blended_megatron_dataset_builder": {"BlendedMegatronDatasetBuilder": Builder},
        "utils": {"get_blend_from_list": lambda paths: paths and ("blend", paths)},
    }
    for file, kind, config in KINDS.values():
        content[file] = {kind: kind, config: SimpleNamespace, "MockGPTDataset": "MockGPTDataset"}
    for name, values in {"": {}, **content}.items():
        module = ModuleType(f"megatron.core.datasets.{name}".rstrip("."))
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["megatron.training.global_vars"].get_tokenizer = lambda: "tokenizer"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize("family", KINDS)
def test_each_family(fake: Fake, family: str) -> None:
    fake.args = Namespace(model_type_name=family, **ARGUMENTS)
    kind, numbers, reads, config = build_datasets([10, 2, 0])
    assert (kind, numbers, reads) == (KINDS[family][1], [10, 2, 0], True)
    assert config.blend == ("blend", ["text"])
    assert (config.blend_per_split, config.tokenizer, config.split) == (None, "tokenizer", "9,1,0")
    assert config.sequence_length == (6 if family == "t5" else 8)


@pytest.mark.usefixtures("datasets")
def test_paths_for_each_split(fake: Fake) -> None:
    paths = {"data_path": None, "train_data_path": ["a"], "valid_data_path": ["b"]}
    fake.args = Namespace(model_type_name="gpt", **{**ARGUMENTS, **paths})
    config = build_datasets([1, 1, 1])[-1]
    assert config.blend is None
    assert config.blend_per_split == [("blend", ["a"]), ("blend", ["b"]), None]


@pytest.mark.usefixtures("datasets")
def test_made_up_texts(fake: Fake) -> None:
    fake.args = Namespace(model_type_name="gpt", mock_data=True, **ARGUMENTS)
    assert build_datasets([1, 1, 1])[0] == "MockGPTDataset"


def test_other_families_are_refused(fake: Fake) -> None:
    fake.args = Namespace(model_type_name="other")
    with pytest.raises(ConfigurationError, match="gpt, bert, t5.*custom_megatron_datasets_provider_function"):
        build_datasets([1, 1, 1])
