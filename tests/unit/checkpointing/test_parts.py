"""The kinds of parts: what they write, and their errors about files that do not fit."""

from __future__ import annotations

import copy
import datetime
import os
import random
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.stand_ins.objects import CreatesFolder
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    CheckpointReader,
    GeneratorsPart,
    LoaderPart,
    ModelPart,
    OptimizerPart,
    Part,
    Payload,
    StatePart,
    capture_generators,
    custom_part,
    no_change,
    optimizer_parts,
    state_parts,
)


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state["value"]


def write(part: Part, folder: Path) -> list[str]:
    payloads: list[Payload] = part.collect()
    for payload in payloads:
        payload.write(payload.content, folder / payload.name)
    return [payload.name for payload in payloads]


def test_a_custom_state_is_saved_and_loaded(tmp_path: Path) -> None:
    assert write(custom_part(2, Holder({"value": [1, Counter("aab")]})), tmp_path) == [
        "custom_checkpoint_2.pkl"
    ]
    holder = Holder()
    change = custom_part(2, holder).read(CheckpointReader(tmp_path))
    assert holder.state is None  # reading changes nothing
    change.apply()
    assert holder.state == [1, Counter("aab")]


@pytest.mark.parametrize("state", [{"other": 1}, [1], 3, None])
def test_a_state_that_does_not_fit_is_named_with_its_file(tmp_path: Path, state: Any) -> None:
    write(custom_part(0, Holder(state)), tmp_path)
    change = custom_part(0, Holder()).read(CheckpointReader(tmp_path))
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl does not fit this Holder"):
        change.apply()


class Color(Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


REFUSED: list[Any] = [
    Path("x"),
    Color.RED,
    deque([1]),
    Point(1, 2),
    datetime.datetime(2020, 1, 1),
    Decimal(1),
    Fraction(1),
    range(3),
    slice(3),
    frozenset({1}),
    random.Random(1),
    np.array([Path("x")], dtype=object),
]
ACCEPTED = [
    *(1, 1.5, None, True, "a", b"a", 1j, [1], (1,), {1}, {}, np.float32(1), np.arange(3), torch.Size([1])),
    *(torch.ones(2), nn.Parameter(torch.ones(2)), torch.float32, torch.device("cpu"), OrderedDict(a=1)),
    *(Counter("a"), defaultdict(list), torch.ones(2).to_sparse(), bytearray(b"a"), b"", np.arange(0)),
]


@pytest.mark.usefixtures("states")
def test_a_warning_names_what_load_state_would_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Accelerator(cpu=True)
    wrong = []
    for number, value in enumerate([*REFUSED, *ACCEPTED]):
        caplog.clear()
        try:
            write(custom_part(number, Holder({"value": {1: [0, value]}})), tmp_path)
        except Exception:  # refused when it is saved
            continue
        try:
            custom_part(number, Holder()).read(CheckpointReader(tmp_path))
            is_read = True
        except CheckpointError:
            is_read = False
        is_named = f"custom_checkpoint_{number}.pkl) holds a `" in caplog.text and (
            "` at ['value'][1][1]. It is saved, but only load_state(load_kwargs=" in caplog.text
        )
        if is_read != (caplog.text == "") or (not is_read and not is_named):
            wrong.append((value, is_read, caplog.text))
    assert not wrong


@pytest.mark.usefixtures("states")
def test_a_warning_names_the_optimizer_and_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True)
    optimizer = adam()
    optimizer.state[PARAMETER]["queue"] = deque([torch.ones(2)])
    write(OptimizerPart("optimizer.bin", optimizer), tmp_path)
    assert (
        "The state of Adam (optimizer.bin) holds a `collections.deque` at ['state'][0]['queue']."
        in caplog.text
    )
    state: dict[Any, Any] = {Color.RED: 1}
    state["itself"] = state
    write(custom_part(7, Holder({"value": state})), tmp_path)
    assert "Color` at the key <Color.RED: 1> of ['value']." in caplog.text


def test_names_count_from_the_first_one_without_a_number() -> None:
    parts = [*optimizer_parts([Holder()] * 2), *state_parts([Holder()] * 2, Holder())]
    assert [part.name for part in parts] == [
        "optimizer.bin",
        "optimizer_1.bin",
        "scheduler.bin",
        "scheduler_1.bin",
        "scaler.pt",
    ]


PARAMETER = nn.Parameter(torch.ones(2, 2))


def adam(**options: Any) -> torch.optim.Optimizer:
    """Returns an optimizer that has taken a step."""
    optimizer = torch.optim.Adam([PARAMETER, nn.Parameter(torch.ones(3))], **options)
    PARAMETER.grad = torch.ones(2, 2)
    optimizer.step()
    return optimizer


def changed(**changes: Any) -> Any:
    state = adam().state_dict()
    return {**state, "state": {0: {**state["state"][0], **changes}}}


def in_groups(*groups: Any) -> Any:
    return {"state": {}, "param_groups": list(groups)}


GROUP = adam().state_dict()["param_groups"][0]
UNFIT = {
    "another shape": (
        changed(exp_avg=torch.ones(2, 3)),
        r"exp_avg with the shape \(2, 3\) instead of \(2, 2\)",
    ),
    "text in place of a tensor": (changed(exp_avg="text"), "a str as exp_avg"),
    "a list": ({**changed(), "state": {0: [1]}}, "a list instead of a dictionary|list"),
    "no step": ({**changed(), "state": {0: {"exp_avg": torch.ones(2, 2)}}}, "step"),
    "an unknown parameter": ({**changed(), "state": {9: {}}}, "parameters that it does not step: 9"),
    "two groups": (in_groups(GROUP, GROUP), "different number of parameter groups"),
    "fewer parameters": (in_groups({**GROUP, "params": [0]}), "match the size"),
    "the groups of SGD": (
        in_groups({key: value for key, value in GROUP.items() if key != "betas"}),
        "lacks betas",
    ),
    "no groups": ({"state": {}}, "not the state of an optimizer"),
    "a number": (3, "not the state of an optimizer"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_state_that_an_optimizer_cannot_load_is_refused_before_it_is_changed(
    tmp_path: Path, name: str
) -> None:
    optimizer, (state, text) = adam(), UNFIT[name]
    torch.save(state, tmp_path / "optimizer.bin")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=rf"(?s)optimizer\.bin does not fit this Adam: .*({text})"):
        optimizer_parts([optimizer])[0].read(CheckpointReader(tmp_path))
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"capturable": False, "foreach": True}])
def test_a_new_optimizer_loads_the_state_of_one_with_other_options(tmp_path: Path, options: Any) -> None:
    saved, optimizer = adam(**options), adam()
    write(optimizer_parts([saved])[0], tmp_path)
    optimizer_parts([optimizer])[0].read(CheckpointReader(tmp_path)).apply()
    assert optimizer.state_dict()["param_groups"] == saved.state_dict()["param_groups"]


class Growing(torch.optim.SGD):
    """Has a state that grows, and code of its own that sets it."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        assert all(not parameter.is_meta for group in self.param_groups for parameter in group["params"])
        for values in self.state.values():
            values["history"].clone()


def test_an_optimizer_with_its_own_code_is_not_called_before_all_ranks_have_read(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Growing([parameter], lr=0.1)
    for length in (3, 5):
        optimizer.state[parameter]["history"] = torch.ones(length)
        write(optimizer_parts([optimizer])[0], tmp_path)
    optimizer.state[parameter]["history"] = torch.ones(3)
    optimizer_parts([optimizer])[0].read(CheckpointReader(tmp_path)).apply()
    assert optimizer.state[parameter]["history"].shape == (5,)


def test_hooks_of_an_optimizer_are_called_once(tmp_path: Path) -> None:
    optimizer, calls = adam(), []
    write(optimizer_parts([optimizer])[0], tmp_path)
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append(1))
    optimizer_parts([optimizer])[0].read(CheckpointReader(tmp_path)).apply()
    assert calls == [1]


def test_incomplete_states_of_a_scaler_and_a_scheduler_are_refused(tmp_path: Path) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(adam(), 1)
    parts = state_parts([scheduler], torch.amp.GradScaler("cpu"))
    torch.save([1], tmp_path / "scheduler.bin")
    torch.save({"scale": 2.0}, tmp_path / "scaler.pt")
    with pytest.raises(CheckpointError, match=r"scheduler\.bin does not fit this StepLR: it is a list"):
        parts[0].read(CheckpointReader(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"scaler\.pt does not fit this GradScaler: it lacks growth_fact"
    ):
        parts[1].read(CheckpointReader(tmp_path))


@pytest.mark.parametrize(("safe", "name"), [(True, "model_1.safetensors"), (False, "pytorch_model_1.bin")])
def test_a_model_is_loaded_from_either_format(tmp_path: Path, safe: bool, name: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert write(ModelPart(1, model.state_dict(), safe=safe), tmp_path) == [name]
    ModelPart(1, model=other).read(CheckpointReader(tmp_path)).apply()
    assert torch.equal(model.weight, other.weight)


def test_a_model_part_without_a_state_or_model_does_nothing(tmp_path: Path) -> None:
    assert ModelPart(0).collect() == []
    assert ModelPart(0).read(CheckpointReader(tmp_path)) is no_change


@pytest.mark.parametrize(
    ("state", "safe", "text"),
    [
        ({"weight": torch.ones(2, 3)}, True, r"It lacks bias\. Prepare the models"),
        ({**nn.Linear(3, 2).state_dict(), "more": torch.ones(1)}, True, "The model does not have more"),
        (
            {"weight": torch.ones(5), "bias": torch.ones(2)},
            True,
            r"weight has the shape \(5,\) instead of \(2, 3\)",
        ),
        ([1, 2], False, "does not fit this Linear"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, state: Any, safe: bool, text: str) -> None:
    if safe:
        write(ModelPart(0, state), tmp_path)
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=text):
        ModelPart(0, model=nn.Linear(3, 2)).read(CheckpointReader(tmp_path)).apply()


def test_strict_false_loads_what_fits(tmp_path: Path) -> None:
    write(ModelPart(0, {"weight": torch.ones(2, 3), "more": torch.ones(1)}), tmp_path)
    model = nn.Linear(3, 2)
    ModelPart(0, model=model).read(CheckpointReader(tmp_path, model_kwargs={"strict": False})).apply()
    assert bool((model.weight == 1).all())


def test_generators_are_restored_and_invalid_states_are_refused(tmp_path: Path) -> None:
    assert write(GeneratorsPart(3, step=7), tmp_path) == ["random_states_3.pkl"]
    drawn = torch.rand(2)
    assert CheckpointReader(tmp_path).read("random_states_3.pkl")["step"] == 7
    GeneratorsPart(3).read(CheckpointReader(tmp_path)).apply()
    assert torch.equal(torch.rand(2), drawn)
    torch.save({**capture_generators(), "torch_manual_seed": "x"}, tmp_path / "random_states_3.pkl")
    with pytest.raises(CheckpointError, match=r"random_states_3\.pkl does not fit this process"):
        GeneratorsPart(3).read(CheckpointReader(tmp_path)).apply()


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("content", [{}, [1], {"version": 1, "seen": "x"}, None])
def test_an_invalid_position_is_named_with_its_file(tmp_path: Path, content: Any) -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4)))
    torch.save(content, tmp_path / "sampler.bin")
    message = r"not the position of a loader|sampler\.bin does not fit this Data"
    with pytest.raises(CheckpointError, match=message):
        LoaderPart(0, loader).read(CheckpointReader(tmp_path, names={"sampler.bin"})).apply()


def test_loaders_without_a_position_have_no_file(tmp_path: Path) -> None:
    plain = DataLoader(range(4))
    assert LoaderPart(0, plain).collect() == []
    assert LoaderPart(0, plain).read(CheckpointReader(tmp_path)) is no_change


@pytest.mark.parametrize("leads", [True, False])
def test_one_process_writes_shared_states(leads: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [*optimizer_parts([optimizer]), ModelPart(0, {"a": torch.ones(1)}), GeneratorsPart(1)]
    names = [payload.name for part in parts for payload in part.collect(leads)]
    assert names == [*(["optimizer.bin", "model.safetensors"] if leads else []), "random_states_1.pkl"]


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(
    "name", ["optimizer.bin", "pytorch_model.bin", "random_states_0.pkl", "sampler.bin", "stream_0_0.bin"]
)
@pytest.mark.parametrize("legacy", [False, True])
def test_no_file_can_run_code(tmp_path: Path, name: str, legacy: bool) -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4)))
    write(LoaderPart(0, loader), tmp_path)
    torch.save(CreatesFolder(tmp_path / "trap"), tmp_path / name, _use_new_zipfile_serialization=not legacy)
    part: Part = {
        "optimizer.bin": StatePart("optimizer.bin", Holder()),
        "pytorch_model.bin": ModelPart(0, model=nn.Linear(1, 1)),
        "random_states_0.pkl": GeneratorsPart(0),
    }.get(name, LoaderPart(0, loader))
    with pytest.raises(CheckpointError, match=rf"{name} (holds a `\w+\.mkdir`|cannot be read)"):
        part.read(CheckpointReader(tmp_path, names=os.listdir(tmp_path)))
    assert not (tmp_path / "trap").exists()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_an_optimizer_keeps_its_tensors_and_gets_none_that_are_views_of_a_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for _ in range(2)]
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizers[0].step()
    part = OptimizerPart("optimizer.bin", optimizers[0])
    (payload,) = part.collect()
    payload.write(payload.content, tmp_path / payload.name)
    saved, live = [value.clone() for value in moments(optimizers[0])], moments(optimizers[0])
    optimizers[0].step()
    for optimizer in optimizers:  # the second one has no state yet
        reader = CheckpointReader(tmp_path, is_fast=True)
        OptimizerPart("optimizer.bin", optimizer).read(reader).apply()
        assert all(map(torch.equal, moments(optimizer), saved))
        assert not any(value.untyped_storage().filename for value in moments(optimizer))
    assert all(own is before for own, before in zip(moments(optimizers[0]), live, strict=True))
