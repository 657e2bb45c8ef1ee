"""Activation checkpointing on several ranks gives the gradients of a run without it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError
from accelerate.utils import ActivationCheckpointing

Run = Callable[..., list[Any]]
WIDTH, LAYERS = 16, 4
POLICIES: dict[str, dict[str, Any]] = {
    "every": {},
    "every second": {"every": 2},
    "by operator": {"save_operators": "matmul"},
    "budget": {"budget": 120_000},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.counts = array("q", [0])  # that a recomputation does not restore

    @property
    def calls(self) -> int:
        return self.counts[0]

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        hidden: Tensor = x + self.drop(self.narrow(nn.functional.gelu(self.widen(self.norm(x)))))
        return hidden


class Net(nn.Module):
    tp_plan = {"layers.*.widen": "colwise", "layers.*.narrow": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x).tanh()  # FSDP 2 warns about views
        return logits


def arguments_of(way: str) -> dict[str, Any]:
    if way.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(way[4]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
            activation_checkpointing="flag" in way,
            use_orig_params=True,
            cpu_ram_efficient_loading="loaded" in way,
            reshard_after_forward="FULL_SHARD" if way[4] == "1" else True,
        )
        return {"fsdp_plugin": plugin}
    if way == "tp":
        return {"parallelism_config": ParallelismConfig(tp_size=dist.get_world_size())}
    return {}


def shard(model: Net, way: str) -> None:
    """Shards a model as a user does before it is prepared."""
    if way == "adopted units":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif way == "adopted plan":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for layer in model.layers:
            parallelize_module(layer, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def trained(way: str, policy: dict[str, Any] | None) -> tuple[dict[str, Tensor], list[int], list[str]]:
    """Weights after two steps, the calls of each layer in the last one, and the names of the state dict."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    handlers = [] if policy is None else [ActivationCheckpointing(**policy)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **arguments_of(way))
    torch.manual_seed(0)
    net = Net()
    shard(net, way)
    layers: list[Any] = list(net.layers)  # FSDP 1 replaces them by wrappers
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    same = way in ("tp", "adopted plan")  # ranks along "tp" have the same batch and random numbers
    seed = 3 if same else 3 + accelerator.process_index
    batches = torch.randn(2, 8, 6, WIDTH, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    for batch in batches:
        for layer in layers:
            layer.counts[0] = 0
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    calls = [layer.calls for layer in layers]
    state = accelerator.get_state_dict(model)
    return {name: whole(value) for name, value in state.items()}, calls, list(model.state_dict())


WAYS = ["ddp", "fsdp2", "fsdp1", "tp", "adopted units", "adopted plan"]
IN_GATE = ("fsdp2",)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in IN_GATE else pytest.mark.slow) for way in WAYS]
)
def test_steps_are_those_without_recomputation(run: Run, way: str) -> None:
    is_split = way in ("tp", "adopted plan", "adopted units")
    policies = {name: policy for name, policy in POLICIES.items() if name != "budget" or not is_split}
    cases = [(way, policy) for policy in (None, *policies.values())]
    for (reference, once, plain), *found in run(call_for_each, trained, cases, timeout=120):
        assert once == [1] * LAYERS
        for name, (weights, calls, names) in zip(policies, found, strict=True):
            assert calls == [2, 1, 2, 1] if name == "every second" else calls[0] == 2, name
            assert names == plain, name
            torch.testing.assert_close(weights, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("fsdp1 flag", marks=pytest.mark.slow),
        pytest.param("fsdp2 flag", marks=pytest.mark.slow),
        "fsdp2 flag, loaded",
    ],
)
def test_the_flag_of_fsdp_recomputes_all_units(run: Run, way: str) -> None:
    expected = run(trained, way.replace("flag", ""), None)
    for (weights, calls, names), (reference, _, plain) in zip(run(trained, way, None), expected, strict=True):
        assert calls == [2] * LAYERS
        assert names == plain
        torch.testing.assert_close(weights, reference, rtol=0, atol=1e-6)


def choice_of_rank(way: str, small: bool) -> tuple[list[int], str]:
    """Calls of each layer if rank 1 has a larger batch than rank 0, or the error."""
    budget = 1 if small else 100_000
    handlers = [ActivationCheckpointing(budget=budget)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **arguments_of(way))
    net = Net()
    model = accelerator.prepare(net)
    batch = torch.ones(2 + 14 * accelerator.process_index, 6, WIDTH)
    try:
        accelerator.backward(model(batch).mean())
    except ConfigurationError as error:
        return [], str(error)
    return [layer.calls for layer in net.layers], ""  # type: ignore[misc]


def test_ranks_that_exchange_shards_use_the_strictest_policy(run: Run) -> None:
    ranks = run(call_for_each, choice_of_rank, [("fsdp2", False), ("ddp", False), ("fsdp2", True)])
    shards, replicas, too_small = zip(*ranks, strict=True)
    assert shards[0] == shards[1]
    assert sum(shards[0][0]) > LAYERS, shards[0][1]
    assert replicas[0][0] == [1] * LAYERS
    assert sum(replicas[1][0]) > LAYERS, replicas[1][1]
    assert "budget=1: the activations of Net need at least" in too_small[0][1]
    assert too_small[0] == too_small[1]


def error_of(way: str) -> str:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    handlers = [ActivationCheckpointing(budget="1GB")]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **arguments_of(way))
    net = Net()
    shard(net, way)
    with pytest.raises(ConfigurationError) as error:
        accelerator.prepare(net)
    return str(error.value)


def test_a_budget_of_activations_that_are_split_raises_an_error(run: Run) -> None:
    for errors in run(call_for_each, error_of, ["tp", "adopted units", "adopted plan"]):
        for error in errors:
            assert "budget='1GB': the activations of a model whose layers or batches are split" in error
