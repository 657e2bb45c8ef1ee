"""Walking the tensors of a module."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
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
    GatheredParameters,
    all_tensors,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    drop_shared,
    find_blocks,
    find_tied_parameters,
    get_model_tp_size,
    get_module_children_bottom_up,
    get_non_persistent_buffers,
    has_forward,
    load_state_dict,
    missing_names,
    model_has_dtensor,
    modules,
    named_module_tensors,
    open_weights,
    read_safetensors,
    retie_on_same_device,
    retie_parameters,
)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.register_buffer("shown", torch.ones(1))
        self.weight = nn.Parameter(torch.ones(1))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.tied = nn.Module()
        self.tied.weight = self.inner.weight
        self.register_buffer("own", torch.ones(1), persistent=False)


def test_names_of_tensors() -> None:
    def names(**options: bool) -> list[str]:
        return [name for name, _ in named_module_tensors(Outer(), **options)]

    assert names() == ["own"]
    assert names(recurse=True) == ["inner.weight", "own", "inner.hidden", "inner.shown"]
    assert names(recurse=True, include_buffers=False) == ["inner.weight"]
    assert names(recurse=True, remove_non_persistent=True) == ["inner.weight", "inner.shown"]


def test_buffers_outside_the_state_dict() -> None:
    assert get_non_persistent_buffers(Outer()) == {"own"}
    assert get_non_persistent_buffers(Outer(), recurse=True) == {"own", "hidden"}
    assert get_non_persistent_buffers(Outer(), recurse=True, fqns=True) == {"own", "inner.hidden"}


def test_a_shared_tensor_has_all_its_names() -> None:
    found = all_tensors(Outer())
    assert sorted(found) == ["inner.hidden", "inner.shown", "inner.weight", "own", "tied.weight"]
    assert found["inner.weight"] is found["tied.weight"]


def test_modules_are_ordered_after_their_children() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    names = ["0", "1.0", "1.1", "1", ""]
    assert [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)] == names  # type: ignore[misc]
    assert get_module_children_bottom_up(model) == [model.get_submodule(name) for name in names]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"tp_size": 4}, 4),
        (SimpleNamespace(tp_size=4), 4),
        ({"tp_plan": "auto"}, None),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_the_tp_size_is_read_from_the_configuration(settings: Any, size: int | None) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(distributed_config=settings)
    assert get_model_tp_size(model) == size
    model.tp_size = None
    assert get_model_tp_size(model) == size


def test_the_tp_size_and_dtensors_of_a_model_are_read() -> None:
    model = nn.Linear(1, 1)
    assert get_model_tp_size(model) is None
    model.tp_size = 3
    assert get_model_tp_size(model) == 3
    model.config = SimpleNamespace(distributed_config={"tp_size": 4})
    assert get_model_tp_size(model) == 3
    assert not model_has_dtensor(model)


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.up = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        if experts:
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Body(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = Layer()
        self.body = Body(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def spell(model: nn.Module, **kwargs: object) -> list[str]:
    return [f"{name}{'+' * inner}" for name, _, inner in find_blocks(model, **kwargs)]  # type: ignore[arg-type]


LEAVES = ["stem.attention", "stem.attention.out_proj", "stem.up.0+"]


def test_items_of_a_module_list_are_blocks_and_the_rest_are_single_tensors() -> None:
    assert spell(Net()) == ["", *LEAVES, "body.norm", "body.layers.0+", "body.layers.1+"]


def test_a_list_inside_opens_its_block() -> None:
    layer = ["attention+", "up+", "experts.0+", "experts.1+"]
    expected = [f"body.layers.{index}.{name}" for index in range(2) for name in layer]
    assert spell(Net(experts=2))[5:] == expected


def test_named_classes_are_blocks() -> None:
    assert spell(Net(2), whole=["Layer"]) == ["", "stem+", "body.norm", "body.layers.0+", "body.layers.1+"]


def test_every_tensor_is_in_one_block() -> None:
    for net in (Net(), Net(3), nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))):
        found = [
            f"{path}.{name}".strip(".")
            for path, module, inner in find_blocks(net)
            for name, _ in module.named_parameters(recurse=inner)
        ]
        assert sorted(found) == sorted(name for name, _ in net.named_parameters())


def test_lists_cannot_be_called() -> None:
    assert not has_forward(nn.ModuleList())
    assert not has_forward(nn.Module())
    assert has_forward(nn.Sequential())


def test_gathered_parameters_without_deepspeed_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "is_deepspeed_available", lambda: False)
    parameter = nn.Parameter(torch.ones(2))
    with GatheredParameters([parameter], modifier_rank=0):
        assert parameter.tolist() == [1.0, 1.0]


def test_deepspeed_is_given_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return nullcontext()

    monkeypatch.setattr(modules, "is_deepspeed_available", lambda: True)
    zero = SimpleNamespace(GatheredParameters=record)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    with GatheredParameters([1], 0, enabled=False):  # type: ignore[list-item]
        pass
    assert calls == [(([1],), {"modifier_rank": 0, "fwd_module": None, "enabled": False})]


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
