"""Parameters with several names."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.weights import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from accelerate.weights.tied import retie_on_same_device


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.a, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.b.weight = self.a.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_they_are_found(device: str) -> None:
    with torch.device(device):
        assert find_tied_parameters(Tied()) == [["a.weight", "b.weight"]]
        assert find_tied_parameters(nn.Linear(2, 2)) == []


def test_they_are_tied_again_by_the_one_that_has_a_value() -> None:
    with torch.device("meta"):
        model = Tied()
    model.b.weight = nn.Parameter(torch.zeros(3, 3))
    retie_parameters(model, [["a.weight", "b.weight"]])
    assert model.a.weight is model.b.weight
    assert model.a.weight.device.type == "cpu"


def test_the_first_value_wins() -> None:
    model = Tied()
    first = model.a.weight
    model.b.weight = nn.Parameter(torch.zeros(3, 3))
    retie_parameters(model, [["a.weight", "b.weight"]])
    assert model.b.weight is first


def test_a_map_that_parts_them_is_named(caplog: pytest.LogCaptureFixture) -> None:
    group = [["a.weight", "b.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(group, {"a": "cpu", "b": "cpu", "c": "disk"})
        assert not caplog.messages
        check_tied_parameters_on_same_device(group, {"": "cpu", "b": "disk"})
    assert "{'a.weight': 'cpu', 'b.weight': 'disk'}" in caplog.text


def test_a_configuration_says_that_words_are_tied() -> None:
    model = nn.Module()
    assert not check_tied_parameters_in_config(model)
    model.config = SimpleNamespace(tie_word_embeddings=True)
    assert not check_tied_parameters_in_config(model)
    model.get_input_embeddings = model.get_output_embeddings = lambda: nn.Linear(1, 1)
    assert check_tied_parameters_in_config(model)
    model.get_output_embeddings = lambda: None
    assert not check_tied_parameters_in_config(model)
    for halves in ({"is_encoder_decoder": True}, {"tie_encoder_decoder": True}):
        model.config = SimpleNamespace(**halves)
        assert not check_tied_parameters_in_config(model)
    model.config = SimpleNamespace(is_encoder_decoder=True, tie_encoder_decoder=True)
    assert check_tied_parameters_in_config(model)


def test_they_are_tied_again_where_they_are_alike() -> None:
    model = Tied()
    model.b.weight = nn.Parameter(torch.zeros(3, 3))
    model.c.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))
    first = model.a.weight
    retie_on_same_device(model, [["a.weight", "b.weight", "c.weight"]])
    assert model.a.weight is first
    assert model.b.weight is first
    assert model.c.weight.dtype == torch.float16
