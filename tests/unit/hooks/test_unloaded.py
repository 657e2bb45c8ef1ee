"""Offloaded weights that code outside of the forward of their module reads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from accelerate import cpu_offload, disk_offload
from accelerate.base import StateError
from accelerate.hooks import remove_hook_from_submodules

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class TiedHead(nn.Module):
    """Model whose output is computed with the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + self.embedding(torch.arange(4)))
        return functional.linear(hidden, self.embedding.weight.to(x.dtype)) + x @ self.embedding.weight.T


class Lists(nn.Module):
    """Model with parameters in modules that have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(3))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.several:
            x = x @ weight
        return torch.cat([x * self.named["scale"], self.named["scale"][None]])


class Encoder(nn.Module):
    """Module with a second method, which other modules call."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(3, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer.forward(x) + self.bias


class Methods(nn.Module):
    """Model that calls another method of a module than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder.encode(x)


class Attention(nn.Module):
    """Model with attention of torch, which reads the weight of its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Normalized(nn.Module):
    """Model with weights that hooks and parametrizations compute before the forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.old = nn.utils.weight_norm(nn.Linear(3, 3))  # its hook runs before the forward
        self.new = parametrizations.weight_norm(nn.Linear(3, 3))
        self.spectral = parametrizations.spectral_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(self.new(self.old(x)))


MODELS = [TiedHead, Lists, Methods, Attention, Normalized]


def build(kind: type[nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind().eval()


def offload(model: Any, on: str, folder: Path) -> Any:
    if on == "cpu":
        return cpu_offload(model, "cpu")
    return disk_offload(model, folder, execution_device="cpu")


@pytest.mark.parametrize("on", ["cpu", "disk"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_weight_that_another_module_reads_has_its_values(
    kind: type[nn.Module], on: str, tmp_path: Path
) -> None:
    expected = build(kind)(X)
    model = offload(build(kind), on, tmp_path)
    copies = [] if kind is Normalized else [copy.deepcopy(model)]  # torch does not copy its weight
    if kind in (TiedHead, Attention):
        copies.append(pickle.loads(pickle.dumps(model)))
    for called in (model, model, *copies):
        assert torch.equal(called(X), expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)


def test_gradients_of_inputs_flow_through_a_weight_that_another_module_reads(tmp_path: Path) -> None:
    x, expected = X.clone().requires_grad_(), X.clone().requires_grad_()
    build(TiedHead)(expected).sum().backward()
    offload(build(TiedHead), "disk", tmp_path)(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected.grad)


def test_an_offloaded_weight_keeps_its_kind_and_its_attributes(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    layer.weight.tag = 7  # type: ignore[attr-defined]
    layer.bias.requires_grad_(False)
    model = offload(layer, "disk", tmp_path)
    weight = model.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((2, 3), torch.float32, "meta")
    assert (weight.requires_grad, model.bias.requires_grad, weight.tag) == (True, False, 7)
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert "meta" in repr(weight)


def test_a_model_that_changes_its_dtype_while_offloaded_reads_its_weights_in_it(tmp_path: Path) -> None:
    expected = build(TiedHead).to(torch.bfloat16)(X.bfloat16())
    model = offload(build(TiedHead), "disk", tmp_path)
    for _ in range(2):
        model(X)  # after the second forward, the first block is prefetched in the old dtype
    assert torch.equal(model.to(torch.bfloat16)(X.bfloat16()), expected)


def test_a_weight_in_another_dtype_is_read_in_it(tmp_path: Path) -> None:
    expected = build(TiedHead)
    model = offload(build(TiedHead), "disk", tmp_path)
    whole = model.embedding.weight.to(torch.float64).detach().to(torch.int32)
    assert torch.equal(whole + 0, expected.embedding.weight.double().int())


def test_a_state_dict_that_is_saved_or_moved_has_the_values(tmp_path: Path) -> None:
    expected = build(TiedHead).state_dict()
    model = offload(build(TiedHead), "disk", tmp_path)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state_dict = model.state_dict()
    moved = {name: value.cpu() for name, value in state_dict.items()}
    for state in (torch.load(buffer), moved, copy.deepcopy(state_dict)):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.zero_(),
        lambda weight: nn.init.ones_(weight),
        lambda weight: nn.init.normal_(weight),
        lambda weight: nn.init.kaiming_uniform_(weight),
        lambda weight: weight.data.copy_(torch.ones(2, 2)),
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.__iadd__(1.0),
        lambda weight: torch.add(torch.ones(2), 1.0, out=weight),
    ],
)
def test_a_change_of_an_offloaded_weight_in_place_is_refused(change: Any, tmp_path: Path) -> None:
    model = offload(nn.Linear(2, 2), "disk", tmp_path)
    with torch.no_grad(), pytest.raises(StateError, match="offloaded weight of shape .* would be lost"):
        change(model.weight)


def test_loading_a_state_into_an_offloaded_model_is_refused(tmp_path: Path) -> None:
    model = offload(nn.Linear(2, 2), "disk", tmp_path)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="change would be lost"):
        warnings.simplefilter("ignore")  # torch warns that nothing is copied
        model.load_state_dict(nn.Linear(2, 2).state_dict())


class Counter(nn.Module):
    """Module with tied weights, whose forward assigns a buffer and changes another one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tied = nn.ModuleList([nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))])
        self.tied[0][1].weight = self.tied[0][0].weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.total += self.count
        output: Tensor = self.tied[0](self.layer(x)) * self.total
        return output


REPLACEMENTS: list[Callable[[Counter], object]] = [
    lambda model: model.load_state_dict(build(Counter, 1).state_dict(), assign=True),
    lambda model: setattr(model.layer, "weight", nn.Parameter(torch.eye(3))),
    lambda model: setattr(model.layer, "bias", None),
    lambda model: setattr(model.tied[0][0], "weight", nn.Parameter(torch.eye(3))),
    lambda model: setattr(model.tied[0][1], "weight", nn.Parameter(torch.eye(3))),
    lambda model: delattr(model.layer, "weight") or setattr(model.layer, "weight", torch.eye(3)),
    lambda model: torch.func.functional_call(model, dict(build(Counter, 1).named_parameters()), X),
]


@pytest.mark.parametrize("on", ["cpu", "disk"])
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_tensors_that_replace_offloaded_ones_are_used(replace: Any, on: str, tmp_path: Path) -> None:
    expected, model = build(Counter), build(Counter)
    if on == "cpu":
        cpu_offload(model, offload_buffers=True)
    else:
        disk_offload(model, tmp_path, offload_buffers=True)
    for _ in range(3):
        assert torch.equal(model(X), expected(X))
    results = [replace(each) for each in (model, expected)]
    if isinstance(results[0], Tensor):
        assert torch.equal(results[0], results[1])  # type: ignore[arg-type]
    for _ in range(2):
        assert torch.equal(model(X), expected(X))
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected(X))


def test_statistics_that_a_forward_changes_are_kept_on_the_disk(tmp_path: Path) -> None:
    expected, model = nn.BatchNorm1d(3), disk_offload(nn.BatchNorm1d(3), tmp_path, offload_buffers=True)
    for each in (expected, model):
        for _ in range(3):
            each(X)
    assert torch.equal(model.eval()(X), expected.eval()(X))


def test_a_copy_of_a_single_offloaded_weight_is_not_used_without_values(tmp_path: Path) -> None:
    model = offload(nn.Linear(2, 2), "disk", tmp_path)
    weight = copy.deepcopy(model.weight)
    assert weight.shape == (2, 2)
    with pytest.raises(StateError, match="Copy the module"):
        torch.ones(1, 2) @ weight


def test_threads_that_call_an_offloaded_model_get_its_outputs(tmp_path: Path) -> None:
    expected = build(TiedHead)(X)
    model, outputs = offload(build(TiedHead), "disk", tmp_path), []
    threads = [threading.Thread(target=lambda: outputs.extend(model(X) for _ in range(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 60
    assert all(torch.equal(output, expected) for output in outputs)
