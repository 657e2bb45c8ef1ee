"""What is done to a model before it is sharded."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from accelerate import FullyShardedDataParallelPlugin, torch_private
from accelerate.state import PartialState
from accelerate.strategies.fsdp import (
    fsdp2_apply_ac,
    fsdp2_prepare_auto_wrap_policy,
    keep_master_weights,
    offload_policy,
    outermost_wrappers,
)

pytestmark = pytest.mark.usefixtures("states")


@pytest.fixture(autouse=True)
def alone() -> None:
    PartialState(cpu=True)


class Block(nn.Linear):
    """A unit."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), Block(2, 2), Block(2, 2))


def run_of(**fields: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        **{"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block", **fields},
    )
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"))


def test_a_wrap_policy_selects_the_units() -> None:
    net = model()
    is_unit = fsdp2_prepare_auto_wrap_policy(run_of().state.fsdp_plugin, net)
    assert is_unit is not None
    assert [is_unit(module) for module in net] == [False, True, True]
    assert fsdp2_prepare_auto_wrap_policy(run_of(auto_wrap_policy="no_wrap").state.fsdp_plugin, net) is None


def test_units_recompute_and_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    net, reference = model(), model()
    blocks = [net[1], net[2]]
    names = set(net.state_dict())
    assert (
        fsdp2_apply_ac(run_of(activation_checkpointing=True, activation_checkpointing_offload=True), net)
        is net
    )
    assert set(net.state_dict()) == names
    assert [net[1], net[2]] == blocks
    calls = []
    monkeypatch.setattr(Block, "forward", lambda self, x: calls.append(1) or nn.Linear.forward(self, x))
    x = torch.ones(1, 2, requires_grad=True)
    net(x).sum().backward()
    assert len(calls) == 4  # each ran again in backward
    monkeypatch.undo()
    y = torch.ones(1, 2, requires_grad=True)
    reference(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_model_of_one_unit_cannot_recompute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fsdp2_apply_ac(run_of(auto_wrap_policy="no_wrap", activation_checkpointing=True), model())
    assert "activation_checkpointing has no effect on Sequential" in caplog.text


def test_the_wrappers_of_a_user_are_found_around_units() -> None:
    net = model()
    block = net[1]
    net[1] = torch_private.checkpoint_wrapper.checkpoint_wrapper(block)
    assert outermost_wrappers(net) == {block: net[1]}


def test_low_precision_gets_master_weights(caplog: pytest.LogCaptureFixture) -> None:
    net = model().to(torch.bfloat16)
    net[0].requires_grad_(False)
    kept = net[1].weight
    with caplog.at_level(logging.WARNING):
        keep_master_weights(net)
    assert net[1].weight is kept
    assert [net[0].weight.dtype, net[1].weight.dtype] == [torch.bfloat16, torch.float32]
    assert "4 trainable parameters of Sequential are kept in float32" in caplog.text


def test_a_cpu_pins_no_memory() -> None:
    cpu, gpu = SimpleNamespace(device_type="cpu"), SimpleNamespace(device_type="cuda")
    assert offload_policy(CPUOffloadPolicy(), cpu) == CPUOffloadPolicy(pin_memory=False)  # type: ignore[arg-type]
    assert offload_policy(CPUOffloadPolicy(), gpu) == CPUOffloadPolicy(pin_memory=True)  # type: ignore[arg-type]
    assert type(offload_policy(OffloadPolicy(), cpu)) is OffloadPolicy  # type: ignore[arg-type]
