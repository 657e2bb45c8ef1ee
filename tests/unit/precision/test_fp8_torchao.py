"""FP8 through torchao, which computes on the CPU too."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.base import FP8BackendType
from accelerate.plugins import AORecipeKwargs
from accelerate.precision import fp8 as precision

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torchao's own


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Sequential(nn.Linear(32, 20), nn.Linear(20, 32)),
        nn.Linear(32, 32),
        nn.Linear(32, 16),
    )


def float8_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_first_and_last_linear_layer() -> None:
    assert precision.find_first_last_linear_layers(build()) == ("0", "4")
    assert precision.find_first_last_linear_layers(nn.ReLU()) == (None, None)


@pytest.mark.parametrize(
    ("name", "listed", "alone"),
    [("0", False, True), ("1", True, True), ("2", True, True), ("2.0", False, False), ("3", True, True)],
)
def test_filters(name: str, listed: bool, alone: bool) -> None:
    module = build().get_submodule(name)
    assert precision.filter_linear_layers(module, name, ["0"]) is listed
    assert precision.filter_first_and_last_linear_layers(module, name) is alone


def test_all_layers_but_the_ends_and_odd_sizes_are_converted() -> None:
    model = build()
    assert not precision.has_ao_layers(model)
    precision.convert_model_to_fp8_ao(model)
    assert float8_layers(model) == ["3"]
    assert precision.has_ao_layers(model)


class Experts(nn.Module):
    """A block with a router, a gated layer that is none, and a layer with an output for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_local_experts=48)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(32, 64), "gate_proj": nn.Linear(32, 64)})
        self.router = nn.ModuleDict({"weigh": nn.Linear(32, 64)})
        self.scores, self.head = nn.Linear(32, 48), nn.Linear(32, 32)


def test_routers_of_experts_stay(states: None, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model = Experts()
    assert precision.find_routers(model) == {"mlp.gate", "router.weigh", "scores"}
    assert not precision.filter_linear_layers(model.mlp["gate"], "mlp.gate", [])
    with caplog.at_level(logging.INFO, logger="accelerate"):
        accelerator.prepare_model(model)
    assert float8_layers(model) == ["last", "mlp.gate_proj"]
    (line,) = (record.getMessage() for record in caplog.records if "FP8" in record.getMessage())
    assert "2 linear layers of Experts are converted (last, mlp.gate_proj), 5 are not (first," in line


class TopKRouter(nn.Module):
    """Router whose class alone says that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(32, 64)


def nested(name: str) -> nn.Module:
    """Returns modules around a linear layer with 16 outputs of this name."""
    module: nn.Module = nn.Linear(32, 16)
    for part in reversed(name.split(".")):
        module = nn.ModuleDict({part: module})
    return module


@pytest.mark.parametrize(
    "name",
    [
        *(
            "router_proj",
            "router_linear",
            "Router",
            "gating",
            "moe_gate",
            "gate_network",
            "shared_expert_gate",
        ),
        *("mlp.gates.0", "mlp.gate.wg", "experts.router.layer"),
    ],
)
def test_words_in_names_of_layers_identify_routers(name: str) -> None:
    assert precision.find_routers(nested(name)) == {name}
    assert not precision.filter_linear_layers(nn.Linear(32, 16), name, [])


@pytest.mark.parametrize("name", ["mlp.gate_proj", "gate_up_proj", "w_gate_up", "investigate", "delegated"])
def test_layers_of_gated_mlps_are_not_routers(name: str) -> None:
    assert not precision.find_routers(nested(name))
    assert precision.filter_linear_layers(nn.Linear(32, 16), name, [])


@pytest.mark.parametrize(("kind", "is_router"), [("MoEGate", 1), ("TopKGating", 1), ("GatedMLP", 0)])
def test_words_in_names_of_classes_identify_routers(kind: str, is_router: int) -> None:
    named = type(kind, (nn.ModuleDict,), {})
    model = nn.ModuleDict({"select": named({"score": nn.Linear(32, 16)}), "top": TopKRouter()})
    assert precision.find_routers(model) == {"top.weigh", *["select.score"] * is_router}
    assert not precision.find_routers(named({"score": nn.Linear(32, 16)}))  # a whole model is no router


@pytest.mark.parametrize(
    ("name", "is_router"),
    [
        ("mlp.scores", True),
        ("self_attn.k_proj", False),
        ("layer.0.SelfAttention.q", False),
        ("linear_attn.mix", False),
        ("mlp.up_proj", False),
        ("mlp.experts.3.wi", False),
        ("mlp.shared_expert.down", False),
    ],
)
def test_as_many_outputs_as_experts_identify_routers_outside_of_attention_and_experts(
    name: str, is_router: bool
) -> None:
    model = nested(name)
    model.config = SimpleNamespace(num_experts=16)  # type: ignore[assignment]
    assert precision.find_routers(model) == ({name} if is_router else set())


def test_a_filter_of_the_user_decides() -> None:
    model = build()
    precision.convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name in ("0", "4"))
    assert float8_layers(model) == ["0", "4"]


@pytest.mark.cpu_only
@pytest.mark.parametrize("gathers", [True, False])
def test_training_in_float8_learns(states: None, gathers: bool) -> None:
    handlers = [AORecipeKwargs(enable_fsdp_float8_all_gather=gathers)]
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)
    assert accelerator.fp8_backend == FP8BackendType.AO
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert float8_layers(model) == ["3"]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert stepped == {id(p) for p in model.parameters()}  # none was replaced behind the optimizer's back
    before = model[3].weight.detach().clone()
    inputs, losses = torch.randn(64, 32), []
    for _ in range(30):
        loss = (model(inputs) - inputs[:, :16]).pow(2).mean()
        assert loss.dtype == torch.float32
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert not torch.equal(model[3].weight, before)


def test_a_model_with_float8_layers_is_unchanged(states: None) -> None:
    model = build()
    precision.convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name == "0")
    accelerator = Accelerator(mixed_precision="fp8")
    assert float8_layers(accelerator.prepare(model)) == ["0"]


def test_clients_replace_the_conversion_in_the_public_module(
    states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    accelerator = Accelerator(mixed_precision="fp8")
    monkeypatch.setattr("accelerate.accelerator.convert_model_to_fp8_ao", lambda *given: seen.append(given))
    model = build()
    accelerator.prepare(model)
    assert [given[0] for given in seen] == [model]
