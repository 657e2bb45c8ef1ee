"""Hooks are attached, chained and removed; one of them casts weights around a forward."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import fx, nn

from accelerate.base import ConfigurationError
from accelerate.big_modeling import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, attach_layerwise_casting_hooks
from accelerate.hooks import (
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hooks_of,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

X = torch.ones(1, 2)


class Adder(ModelHook):
    """Adds to inputs and outputs, and records its calls."""

    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before, self.after = before, after
        self.log: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.log.append("init")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.log.append("pre")
        return tuple(each + self.before for each in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append("post")
        return output + self.after

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.log.append("detach")
        return module


class Double(nn.Module):
    def forward(self, x: torch.Tensor, *, more: float = 0) -> torch.Tensor:
        """Say so."""
        return 2 * x + more


def test_a_hook_runs_around_the_forward_until_it_is_removed() -> None:
    module, hook = Double(), Adder(1, 10)
    assert add_hook_to_module(module, hook) is module
    assert torch.equal(module(X, more=0.5), 2 * (X + 1) + 10.5)
    assert {"_hf_hook", "_old_forward", "forward"} <= vars(module).keys()
    assert inspect.signature(module.forward) == inspect.signature(Double().forward)
    assert module.forward.__doc__ == "Say so."
    assert remove_hook_from_module(module) is module
    assert torch.equal(module(X), 2 * X)
    assert not {"_hf_hook", "_old_forward", "forward"} & vars(module).keys()
    assert hook.log == ["init", "pre", "post", "detach"]


def test_a_new_hook_replaces_the_old_one_or_is_appended() -> None:
    module = Double()
    add_hook_to_module(module, Adder(1))
    add_hook_to_module(module, Adder(0, 3))
    assert torch.equal(module(X), 2 * X + 3)
    add_hook_to_module(module, Adder(5), append=True)
    assert torch.equal(module(X), 2 * (X + 5) + 3)
    assert [type(hook) for hook in hooks_of(module)] == [Adder, Adder]
    assert isinstance(module._hf_hook, SequentialHook)
    add_hook_to_module(module, Adder(0, 7), append=True)
    assert torch.equal(module(X), 2 * (X + 5) + 10)
    remove_hook_from_module(module)
    assert torch.equal(module(X), 2 * X)
    assert hooks_of(module) == ()


def test_the_base_hook_changes_nothing() -> None:
    module = add_hook_to_module(Double(), ModelHook())
    assert torch.equal(module(X, more=1), 2 * X + 1)


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_hook_may_disable_gradients(no_grad: bool) -> None:
    hook = ModelHook()
    hook.no_grad = no_grad
    module = add_hook_to_module(nn.Linear(2, 2), hook)
    assert module(X).requires_grad is not no_grad


def test_any_object_with_the_methods_is_a_hook() -> None:
    class Other:
        no_grad = False

        def init_hook(self, module: nn.Module) -> nn.Module:
            return module

        detach_hook = init_hook

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 3,), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output

    module = add_hook_to_module(Double(), Other())  # type: ignore[arg-type]
    assert torch.equal(module(X), 6 * X)


def test_a_forward_set_on_the_instance_is_restored() -> None:
    module = Double()
    module.forward = own = lambda x: x + 100  # type: ignore[method-assign]
    add_hook_to_module(module, Adder(1))
    assert torch.equal(module(X), X + 101)
    remove_hook_from_module(module)
    assert module.forward is own


def test_all_modules_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for module in model.modules():
        add_hook_to_module(module, Adder(1, 1))
    remove_hook_from_module(model)
    assert not hasattr(model, "_hf_hook")
    assert hasattr(model[1], "_hf_hook")
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_copy_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    add_hook_to_module(model[0], Adder(0, 10))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.zero_()
    assert torch.equal(copied(X), torch.full((1, 2), 10.0))
    assert not torch.equal(model(X), copied(X))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(X), model(X))


def test_hooks_are_added_to_traced_modules() -> None:
    module = fx.symbolic_trace(Double())
    add_hook_to_module(module, Adder(1))
    assert torch.equal(module(X), 2 * (X + 1))
    remove_hook_from_module(module)
    assert torch.equal(module(X), 2 * X)


def test_weights_are_in_the_small_dtype_between_forwards() -> None:
    layer = nn.Linear(4, 4)
    expected = nn.Linear(4, 4)
    expected.load_state_dict({name: each.bfloat16() for name, each in layer.state_dict().items()})
    add_hook_to_module(layer, LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False))
    x = torch.randn(2, 4)
    for _ in range(2):
        assert layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer(x), expected(x))
    remove_hook_from_module(layer)
    assert layer.weight.dtype == torch.float32


SMALL, FULL = torch.bfloat16, torch.float32


def build() -> nn.ModuleDict:
    block = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "norm": nn.LayerNorm(4)})
    return nn.ModuleDict({"embed": nn.Embedding(5, 4), "block": block, "head": nn.Linear(4, 5)})


def small(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name, each in model.named_parameters() if each.dtype == SMALL}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"block.conv", "head"}),
        ({"skip_modules_pattern": ["head"]}, {"block.conv"}),
        ({"skip_modules_pattern": "^block$"}, {"head"}),
        ({"skip_modules_pattern": ("conv", "he.d")}, set()),
        ({"skip_modules_classes": (nn.Linear,)}, {"block.conv"}),
        ({"skip_modules_classes": (nn.ModuleDict,)}, set()),
    ],
)
def test_patterns_select_the_layers(options: dict[str, object], expected: set[str]) -> None:
    model = build()
    attach_layerwise_casting_hooks(model, SMALL, FULL, **options)  # type: ignore[arg-type]
    assert small(model) == expected


def test_layers_compute_in_the_larger_format() -> None:
    layer = nn.Linear(4, 4)
    attach_layerwise_casting_hooks(layer, SMALL, FULL)
    assert layer(torch.ones(1, 4)).dtype == FULL
    assert small(layer) == {""}
    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


def test_weights_that_an_embedding_shares_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.body(self.embed(x)))
            return found

    model = Tied()
    attach_layerwise_casting_hooks(model, "float16", "float32")
    assert model.body.weight.dtype == torch.float16
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == torch.float32
    assert model(torch.tensor([1, 2])).shape == (2, 5)


@pytest.mark.parametrize("train", [True, False])
def test_weights_that_torch_uses_without_a_forward_stay(train: bool) -> None:
    layers = (nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 4))
    model = nn.ModuleList(layers).train(train)
    attach_layerwise_casting_hooks(model, SMALL, FULL)
    assert small(model) == {"2"}
    x = torch.ones(2, 1, 4)
    with torch.no_grad():
        assert layers[1](layers[0](x, x, x)[0]).dtype == FULL


@pytest.mark.parametrize(
    ("dtype", "pattern", "said"),
    [("float61", None, "dtype='float61'"), ("float16", "(", "skip_modules_pattern=.*not a regular")],
)
def test_unsupported_dtypes_and_layers_are_refused(dtype: str, pattern: str | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        attach_layerwise_casting_hooks(nn.Linear(2, 2), dtype, "float32", pattern)
