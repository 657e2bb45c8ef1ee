"""FSDP on XLA devices: which tensors are marked, what is wrapped, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import FullyShardedDataParallelPlugin
from accelerate.base import ConfigurationError
from accelerate.strategies import Context
from accelerate.strategies.xla import XlaFullyShard, XlaFullySharded

UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}


@pytest.fixture
def asking(context: Context) -> Callable[..., Context]:
    def build(version: int, **fields: Any) -> Context:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **fields)
        return replace(context, request=replace(context.request, fsdp=plugin))

    return build


def test_parameters_and_units_are_marked(fake: Any, asking: Any) -> None:
    strategy = XlaFullyShard(asking(2, activation_checkpointing=True, **UNITS))
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert strategy.parallelize(model) is model
    assert fake.calls == [
        ("recompute", "Linear"),
        ("recompute", "Linear"),
        ((4, 2), ("fsdp", None)),
        ((4,), ("fsdp",)),
        ((2, 4), (None, "fsdp")),
        ((2,), ("fsdp",)),
        *("Linear", "Linear", "Sequential"),
    ]
    assert [len(unit._forward_hooks) for unit in (model, model[0], model[1])] == [1, 1, 1]
    fake.calls.clear()
    model(torch.ones(8, 2))
    assert fake.calls == [], "only tensors of the device are marked"


def test_outputs_are_marked(fake: Any, asking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnXla:
        device, ndim, shape = torch.device("xla"), 2, (8, 3)

    strategy = XlaFullyShard(asking(2))
    monkeypatch.setattr("accelerate.strategies.xla.iterate_tensors", lambda output: [OnXla()])
    strategy._shard_output(nn.Linear(1, 1), (), {"logits": 1})
    assert fake.calls == [((8, 3), ("fsdp", None))]


class Wrapped(nn.Module):
    """As torch_xla's wrapper has it: parts of parameters, by the names that they had."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.arguments = arguments
        self.sharded_params = []
        for name, old in list(module.named_parameters()):
            part = nn.Parameter(old.detach().flatten()[: old.numel() // 2])
            part._orig_name = f"_fpw_module.{name}"  # type: ignore[attr-defined]
            self.register_parameter(name.replace(".", "_"), part)
            self.sharded_params.append(part)
        self.norms: list[Any] = []

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        self.norms.append((max_norm, norm_type))
        return torch.tensor(5.0)


@pytest.fixture
def wrapped(fake: Any, asking: Any) -> Any:
    import sys

    sys.modules["torch_xla.distributed.fsdp"].XlaFullyShardedDataParallel = Wrapped  # type: ignore[attr-defined]
    strategy = XlaFullySharded(asking(1, sharding_strategy="SHARD_GRAD_OP", **UNITS))
    model = nn.Sequential(nn.Linear(2, 4))
    optimizer = strategy.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), to_device=False)
    strategy.session.prepared.optimizers.append(optimizer)
    return strategy, strategy.parallelize(model), optimizer


def test_version_one_wraps_and_optimizers_follow(wrapped: Any) -> None:
    _, model, optimizer = wrapped
    assert optimizer.param_groups[0]["params"] == model.sharded_params
    assert model.arguments["reshard_after_forward"] is False
    assert model.arguments["compute_dtype"] is None
    linear = nn.Linear(1, 1)
    assert model.arguments["auto_wrap_policy"](module=linear, recurse=False, unwrapped_params=2) is True


def test_version_one_clips_with_the_method_of_the_model(wrapped: Any, fake: Any) -> None:
    strategy, model, optimizer = wrapped
    for part in model.sharded_params:
        part.grad = torch.ones_like(part)
    assert strategy.clip_grad_norm(iter(model.sharded_params), 0.5) == 5.0
    assert model.norms == [(0.5, 2.0)]
    optimizer.step()
    assert fake.calls == ["sync"]
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    assert strategy.clip_grad_norm([other], 0.5) == 1.0


def test_version_one_neither_saves_nor_loads(wrapped: Any) -> None:
    strategy, model, optimizer = wrapped
    for call in (
        lambda: strategy.state.state_dict(model, unwrap=True),
        lambda: strategy.state.load_weights(model, {}, lambda *given: None),
        lambda: strategy.state.optimizer_owners([optimizer], gather=True),
    ):
        with pytest.raises(ConfigurationError, match="Set fsdp_version=2"):
            call()
