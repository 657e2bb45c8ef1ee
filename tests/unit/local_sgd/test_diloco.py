"""DiLoCo on one process: its arguments, what it refuses, and its checkpoints."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DiLoCo
from accelerate.base import CheckpointError, PreparationError, StateError
from accelerate.weights import read_safetensors

pytestmark = pytest.mark.usefixtures("states")


def prepared(**options: Any) -> tuple[Any, Any, Any, DiLoCo]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer, DiLoCo(accelerator, model, **{"local_sgd_steps": 4, **options})


def take_steps(accelerator: Any, model: Any, optimizer: Any, diloco: DiLoCo, count: int) -> None:
    for _ in range(count):
        accelerator.backward(model(torch.randn(4, 2)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"local_sgd_steps": 0}, "local_sgd_steps=0: it is not an integer of at least 1"),
        ({"local_sgd_steps": 2.5}, "local_sgd_steps=2.5"),
        ({"num_fragments": 0}, "num_fragments=0"),
        ({"num_fragments": 5}, "num_fragments=5: an interval of local_sgd_steps=4"),
        ({"num_fragments": 9, "local_sgd_steps": 20}, "the model trains 6 parameters"),
        ({"delay": -1}, "delay=-1"),
        ({"delay": 4}, "delay=4"),
        ({"mixing": 1.0}, "mixing=1.0: a rank keeps this part"),
        ({"mixing": "half"}, "mixing='half'"),
        ({"quantize": "int4"}, "quantize='int4': no such format"),
        ({"device": "gpu"}, "device='gpu': it is not a device of torch"),
        ({"outer_optimizer": 3}, "outer_optimizer=3: it is not a function"),
        ({"outer_optimizer": lambda parameters: 3}, "it returns a int"),
        ({"outer_optimizer": lambda p: torch.optim.SGD(p[:1], lr=1.0)}, "steps other parameters"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as raised:
        prepared(**options)
    assert str(raised.value).count("\n") == 0


def test_an_optimizer_is_no_function_of_parameters() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="it is not a function that returns the optimizer"):
        prepared(outer_optimizer=optimizer)


def test_a_model_that_is_not_prepared_is_refused() -> None:
    with pytest.raises(ValueError, match="model='Linear': it is not prepared"):
        DiLoCo(Accelerator(cpu=True), nn.Linear(1, 1))


def test_complex_parameters_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, dtype=torch.complex64))
    with pytest.raises(PreparationError, match="averages dense floating-point parameters"):
        DiLoCo(accelerator, model)


def test_replica_groups_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator._runtime.groups.repeats_steps = True
    with pytest.raises(PreparationError, match="does not work with replica groups"):
        DiLoCo(accelerator, model)


def test_sharded_models_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator._runtime.strategy.holds_whole_models = False
    with pytest.raises(PreparationError, match="DiLoCo averages whole models"):
        DiLoCo(accelerator, model)


def test_ranks_that_train_on_one_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = SimpleNamespace(mesh_dim_names=("sp",), shape=(2,))
    monkeypatch.setattr(Accelerator, "torch_device_mesh", mesh)
    with pytest.raises(PreparationError, match="the ranks of sp_size=2 train on one batch together"):
        prepared()


def test_steps_outside_of_the_block_and_of_other_parameters_are_refused() -> None:
    *objects, diloco = prepared(local_sgd_steps=1)
    with pytest.raises(StateError, match="outside of the block"):
        diloco.step()
    with diloco:
        with diloco.applied(), pytest.raises(StateError, match=r"inside of applied\(\)"):
            diloco.step()
        objects[1][0].weight.requires_grad_(False)
        with pytest.raises(StateError, match="trains other parameters"):
            take_steps(*objects, diloco, 1)  # type: ignore[call-arg]
        objects[1][0].weight.requires_grad_(True)


def test_disabled_it_has_no_effect() -> None:
    accelerator, model, optimizer, diloco = prepared(enabled=False)
    with diloco, diloco.applied():
        take_steps(accelerator, model, optimizer, diloco, 5)
    assert (diloco.num_steps, diloco.bytes_sent) == (5, 0)
    assert accelerator._runtime.prepared.local_sgd == []


def test_global_parameters_are_applied_and_the_weights_are_restored(tmp_path: Path) -> None:
    accelerator, model, optimizer, diloco = prepared()
    with diloco:
        take_steps(accelerator, model, optimizer, diloco, 6)
        own = [parameter.detach().clone() for parameter in model.parameters()]
        with diloco.applied() as applied:
            assert applied is model
            assert all(map(torch.equal, model.parameters(), diloco.globals))
            accelerator.save_model(model, tmp_path)
            with pytest.raises(StateError, match="cannot be nested"), diloco.applied():
                pass
            with pytest.raises(StateError, match="leave the block before the save"):
                accelerator.save_state(tmp_path / "checkpoint")
            with pytest.raises(StateError, match="would train the global parameters of Sequential"):
                optimizer.step()
        accelerator.save_state(tmp_path / "checkpoint")
        with diloco.applied(), pytest.raises((StateError, CheckpointError), match="before the load"):
            accelerator.load_state(tmp_path / "checkpoint")
        assert all(map(torch.equal, model.parameters(), own))
        assert optimizer.observers == ()
        assert not torch.equal(own[0], diloco.globals[0])
        assert torch.equal(read_safetensors(tmp_path / "model.safetensors")["0.weight"], diloco.globals[0])
    assert all(map(torch.equal, model.parameters(), diloco.globals))


def test_a_buffer_that_is_a_view_of_a_weight_is_saved_with_its_own_shape(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 3)
    model.register_buffer("first", model.bias.data[:1])
    model = accelerator.prepare(model)
    with DiLoCo(accelerator, model, local_sgd_steps=2):
        accelerator.save_state(tmp_path)
        accelerator.load_state(tmp_path)
    assert read_safetensors(tmp_path / "model.safetensors")["first"].shape == (1,)


def test_checkpoints_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    accelerator, model, optimizer, diloco = prepared(num_fragments=2)
    accelerator.save_state(tmp_path / "with")
    with diloco:
        take_steps(accelerator, model, optimizer, diloco, 3)
        before = copy.deepcopy(model.state_dict())
        accelerator._runtime.prepared.local_sgd.clear()
        DiLoCo(accelerator, model, 4, num_fragments=3)
        with pytest.raises(CheckpointError, match="num_fragments=2, and this run has num_fragments=3"):
            accelerator.load_state(tmp_path / "with")
        accelerator._runtime.prepared.local_sgd.clear()
        accelerator.save_state(tmp_path / "without")
        DiLoCo(accelerator, model, 4)
        with pytest.raises(CheckpointError, match="it was saved without DiLoCo"):
            accelerator.load_state(tmp_path / "without")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_outer_optimizer_is_that_of_the_user() -> None:
    build = partial(torch.optim.AdamW, lr=0.25)
    accelerator, model, optimizer, diloco = prepared(outer_optimizer=build, num_fragments=2)
    with diloco:
        take_steps(accelerator, model, optimizer, diloco, 8)
    assert isinstance(diloco.outer_optimizer, torch.optim.AdamW)
    states = diloco.outer_optimizer.state
    assert {float(state["step"]) for state in states.values()} == {2.0}
    assert len(states) == 6


def test_a_loaded_run_has_the_position_of_each_fragment_and_of_started_exchanges(tmp_path: Path) -> None:
    accelerator, model, optimizer, diloco = prepared(num_fragments=2, delay=2)
    with diloco:
        take_steps(accelerator, model, optimizer, diloco, 7)
        accelerator.save_state(tmp_path / "checkpoint")
        take_steps(accelerator, model, optimizer, diloco, 3)
        accelerator.load_state(tmp_path / "checkpoint")
        assert diloco.num_steps == 7
        assert [fragment.started for fragment in diloco.fragments] == [6, 4]
        assert [(exchange.index, exchange.started) for exchange in diloco.exchanges] == [(0, 6)]
    assert diloco.exchanges == []
