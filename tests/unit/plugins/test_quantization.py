"""How bitsandbytes quantizes: what is accepted, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError, CustomDtype
from accelerate.plugins import BnbQuantizationConfig


def test_the_number_of_bits_sets_the_dtypes() -> None:
    eight = BnbQuantizationConfig(load_in_8bit=True)
    assert (eight.torch_dtype, eight.target_dtype) == (torch.float16, torch.int8)
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert (four.torch_dtype, four.target_dtype) == (torch.bfloat16, CustomDtype.INT4)
    assert four.bnb_4bit_compute_dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bnb_4bit_compute_dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_names_of_formats(name: str, given: Any, kept: torch.dtype) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, **{name: given})
    assert getattr(config, name) == kept


def test_modules_that_are_not_quantized() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["a"], keep_in_fp32_modules=["b"])
    assert config.unquantized_modules == ["a", "b"]
    assert BnbQuantizationConfig(load_in_8bit=True).unquantized_modules == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "are both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "can't be both True.*only one"),
        ({"load_in_8bit": 1}, "load_in_8bit=1: it is not a boolean"),
        ({"load_in_4bit": "yes"}, "load_in_4bit='yes'"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": 2}, "bnb_4bit_use_double_quant=2"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold='6': it is not a number"),
        ({"load_in_8bit": True, "llm_int8_threshold": True}, "llm_int8_threshold=True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4'.*fp4, nf4"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "half"}, "compute_dtype='half'.*fp32, fp16, bf16"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": None},
            "bnb_4bit_compute_dtype=None: it is not a dtype",
        ),
        ({"load_in_8bit": True, "torch_dtype": 16}, "torch_dtype=16: it is not a dtype"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "skip_modules='head': it is not a list"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": "norm"}, "keep_in_fp32_modules='norm'"),
    ],
)
def test_contradicting_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BnbQuantizationConfig(**given)


def test_the_config_can_be_imported_from_its_public_paths() -> None:
    from accelerate import utils
    from accelerate.utils import dataclasses

    assert utils.BnbQuantizationConfig is dataclasses.BnbQuantizationConfig is BnbQuantizationConfig
