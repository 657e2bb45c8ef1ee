"""Several names of one tensor in a state dict."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.base import CheckpointError
from accelerate.devices import hardware_table
from accelerate.weights import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    drop_shared,
    find_tied_parameters,
    load_state_dict,
    missing_names,
    modules,
    open_weights,
    read_safetensors,
    retie_on_same_device,
    retie_parameters,
)


def test_a_tensor_with_several_names_is_kept_once() -> None:
    weight, other = torch.ones(2, 3), torch.zeros(2, 3)
    kept, aliases = drop_shared({"a": weight, "b": other, "c": weight, "d": weight})
    assert list(kept) == ["a", "b"]
    assert aliases == {"c": "a", "d": "a"}
    again = {**kept, **{name: kept[first] for name, first in aliases.items()}}
    assert again["c"] is again["d"] is again["a"]


def test_parts_of_one_memory_are_kept_as_copies() -> None:
    memory = torch.arange(6.0)
    kept, aliases = drop_shared({"head": memory[:4], "tail": memory[2:], "turned": memory.view(2, 3).t()})
    assert aliases == {}
    places = {tensor.untyped_storage().data_ptr() for tensor in kept.values()}
    assert len(places) == 3
    assert kept["tail"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert kept["turned"].is_contiguous()


def test_empty_tensors_share_nothing() -> None:
    kept, aliases = drop_shared({"a": torch.ones(0), "b": torch.ones(0)})
    assert list(kept) == ["a", "b"]
    assert aliases == {}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["a"]', "holds a list instead of a dictionary"),
        ("7", "holds a int instead"),
        ('{"b": 1}', "gives 'b' a int instead of a name"),
        ('{"b": ["a"]}', "gives 'b' a list instead of a name"),
        ('{"b": null}', "gives 'b' a NoneType instead of a name"),
        ('{"b": "none"}', "'b' is 'none', and no tensor has that name"),
        ('{"b": "c", "c": "b"}', "'b' is 'c', and no tensor has that name"),
        ('{"b": "b"}', "'b' is 'b', and no tensor has that name"),
        ('{"a": "a"}', "names 'a', and there is a tensor of that name"),
        ('{"a": "other"}', "names 'a', and there is a tensor of that name"),
    ],
)
def test_wrong_aliases_of_a_file_are_named_by_all_readers(tmp_path: Path, entry: str, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "other": torch.zeros(2)}, path, {"format": "pt", modules.ALIASES: entry})
    for read in (read_safetensors, load_state_dict, open_weights):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert reason in str(caught.value)
        assert str(path) in str(caught.value)


def test_one_name_of_a_shared_tensor_is_enough() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    assert missing_names(model.state_dict(), {"a.weight": torch.ones(2, 2)}) == ["b.weight"]
    model["b"].weight = model["a"].weight
    assert missing_names(model.state_dict(), {"b.weight": torch.ones(2, 2)}) == []
    assert missing_names(model.state_dict(), {}) == ["a.weight", "b.weight"]


def test_addressable_copies_tensors_without_addresses_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(2, device="meta"), torch.zeros(2)
    assert modules.addressable({"a": second}) == {"a": second}
    monkeypatch.setattr(
        modules, "of_device", lambda device: hardware_table.named({"cpu": "xla"}.get(device.type, "cpu"))
    )
    state = modules.addressable({"a": second, "b": second, "c": first, "d": 3})
    assert state["a"] is state["b"]
    assert state["c"] is first
    assert state["d"] == 3


class Wrapped(torch.Tensor):
    """Holds another tensor, and has no address of its own: float8 weights are such."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, Wrapped) else each for each in args), **(kwargs or {}))


def test_tensors_without_an_address_are_not_shared() -> None:
    first, second = Wrapped(torch.ones(2)), Wrapped(torch.zeros(2))
    assert modules.missing_names({"a": first, "b": second, "c": first}, {"a"}) == ["b"]
    assert len({modules.memory_of(tensor) for tensor in (first, second, first)}) == 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.a, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.b.weight = self.a.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_are_found(device: str) -> None:
    with torch.device(device):
        assert find_tied_parameters(Tied()) == [["a.weight", "b.weight"]]
        assert find_tied_parameters(nn.Linear(2, 2)) == []


def test_parameters_are_tied_again_to_the_one_with_a_value() -> None:
    with torch.device("meta"):
        model = Tied()
    model.b.weight = nn.Parameter(torch.zeros(3, 3))
    retie_parameters(model, [["a.weight", "b.weight"]])
    assert model.a.weight is model.b.weight
    assert model.a.weight.device.type == "cpu"


def test_the_first_value_is_kept() -> None:
    model = Tied()
    first = model.a.weight
    model.b.weight = nn.Parameter(torch.zeros(3, 3))
    retie_parameters(model, [["a.weight", "b.weight"]])
    assert model.b.weight is first


def test_a_device_map_that_separates_tied_weights_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    group = [["a.weight", "b.weight"]]
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device(group, {"a": "cpu", "b": "cpu", "c": "disk"})
        assert not caplog.messages
        check_tied_parameters_on_same_device(group, {"": "cpu", "b": "disk"})
    assert "{'a.weight': 'cpu', 'b.weight': 'disk'}" in caplog.text


def test_tied_embeddings_are_read_from_the_configuration() -> None:
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


def test_parameters_of_equal_dtype_and_device_are_tied_again() -> None:
    model = Tied()
    model.b.weight = nn.Parameter(torch.zeros(3, 3))
    model.c.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))
    first = model.a.weight
    retie_on_same_device(model, [["a.weight", "b.weight", "c.weight"]])
    assert model.a.weight is first
    assert model.b.weight is first
    assert model.c.weight.dtype == torch.float16
