"""FP8 through Transformer Engine, replaced by layers that compute as those of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError, PreparationError
from accelerate.plugins import TERecipeKwargs
from accelerate.precision import TransformerEnginePrecision, fp8 as precision
from accelerate.strategies import Strategy


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: Any, device: Any) -> None:
        super().__init__(inputs, outputs, bias, device, params_dtype)


class LayerNorm(nn.LayerNorm):
    def __init__(self, size: int, eps: float, params_dtype: Any, device: Any) -> None:
        super().__init__(size, eps, device=device, dtype=params_dtype)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a Transformer Engine in place; the list notes each FP8 context."""
    seen: list[Any] = []

    @contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        seen.append((enabled, fp8_recipe))
        yield

    modules = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            "DelayedScaling": lambda **given: ("delayed", given),
            "MXFP8BlockScaling": lambda **given: ("blocks", given),
            "Format": SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"),
        },
        "transformer_engine.pytorch": {
            "Linear": Linear,
            "LayerNorm": LayerNorm,
            "TransformerLayer": type("TransformerLayer", (nn.Module,), {}),
            "fp8_autocast": fp8_autocast,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(precision, "require", lambda package, feature: None)
    return seen


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 20)), nn.Linear(20, 16, False)
    )


@pytest.mark.usefixtures("contexts")
def test_routers_of_experts_stay() -> None:
    model = nn.ModuleDict({"gate": nn.Linear(16, 32), "gate_proj": nn.Linear(16, 32)})
    precision.convert_model(model)
    assert [type(layer) for layer in model.values()] == [nn.Linear, Linear]


@pytest.mark.usefixtures("contexts")
def test_layers_are_replaced_with_their_weights_and_back() -> None:
    model = build()
    model[0].bias.requires_grad_(False)
    inputs = torch.randn(4, 16)
    expected, state = model(inputs), {name: value.clone() for name, value in model.state_dict().items()}
    precision.convert_model(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds == [
        nn.Sequential,
        Linear,
        LayerNorm,
        nn.Sequential,
        nn.Linear,
        nn.Linear,
    ]  # 20 is no multiple
    assert precision.has_transformer_engine_layers(model)
    assert [p.requires_grad for p in model[0].parameters()] == [True, False]
    assert torch.equal(model(inputs), expected)
    precision.convert_model(model, to_transformer_engine=False)
    assert not precision.has_transformer_engine_layers(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("contexts")
def test_layers_stay_shared_and_weights_stay_tied() -> None:
    shared, embedding, head = nn.Linear(16, 16), nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, shared, nn.Sequential(shared, shared), head)
    precision.convert_model(model)
    assert model[3].weight is model[0].weight
    assert isinstance(model[1], Linear)
    assert model[2][0] is model[2][1] is model[1]


@pytest.mark.usefixtures("contexts")
@pytest.mark.parametrize(("linear", "norm"), [(True, False), (False, True)])
def test_one_kind_of_layer_may_be_left_out(linear: bool, norm: bool) -> None:
    model = build()
    precision.convert_model(model, _convert_linear=linear, _convert_ln=norm)
    assert (type(model[0]) is Linear, type(model[1]) is LayerNorm) == (linear, norm)


def test_the_forward_runs_in_fp8_while_training(contexts: list[Any]) -> None:
    model = precision.apply_fp8_autowrap(build(), TERecipeKwargs(margin=2))
    model(torch.randn(2, 16))
    model.eval()
    model(torch.randn(2, 16))
    recipe = ("delayed", {"fp8_format": "hybrid", "margin": 2})
    assert contexts == [(True, recipe), (False, recipe)]


def test_evaluation_may_run_in_fp8_and_blocks_may_have_scales(contexts: list[Any]) -> None:
    handler = TERecipeKwargs(use_autocast_during_eval=True, use_mxfp8_block_scaling=True, fp8_format="E4M3")
    model = precision.apply_fp8_autowrap(build().eval(), handler)
    model(torch.randn(2, 16))
    assert contexts == [(True, ("blocks", {"fp8_format": "e4m3"}))]


@pytest.mark.usefixtures("contexts")
def test_blocks_take_no_margin() -> None:
    with pytest.raises(ConfigurationError, match="has no margin"):
        precision.build_recipe(build(), TERecipeKwargs(use_mxfp8_block_scaling=True, margin=1))


@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:User provided device_type")
def test_the_format_converts_once_and_returns_float32(contexts: list[Any]) -> None:
    format_ = TransformerEnginePrecision("cuda", TERecipeKwargs())
    model = build()
    assert format_.convert(model) is model
    assert model(torch.randn(2, 16)).dtype == torch.float32
    assert [enabled for enabled, _ in contexts] == [True]
    weight = model[0].weight
    format_.convert(model)
    assert model[0].weight is weight


def test_transformer_engine_needs_a_supported_device() -> None:
    with pytest.raises(ConfigurationError, match="this run is on cpu"):
        TransformerEnginePrecision("cpu", TERecipeKwargs())


@pytest.mark.usefixtures("contexts")
def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(PreparationError, match="multiples of 16"):
        TransformerEnginePrecision("cuda", TERecipeKwargs()).convert(nn.Linear(3, 3))


@pytest.mark.usefixtures("contexts", "states")
@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:User provided device_type")
def test_optimizers_follow_the_new_parameters() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    strategy = accelerator._runtime.strategy
    assert isinstance(strategy, Strategy)
    strategy.precision = TransformerEnginePrecision("cuda", TERecipeKwargs())
    model = build()
    first, late = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    model, first = accelerator.prepare(model, first)
    late = accelerator.prepare(late)
    for optimizer in (first, late):
        stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert stepped == [id(p) for p in model.parameters()]
