"""What FSDP 1 keeps under private names is there in the installed torch, and is what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from accelerate import torch_private
from accelerate.state import PartialState

SHARED, CPU = ShardingStrategy.SHARD_GRAD_OP, torch.device("cpu")


def check_units() -> list[str]:
    PartialState()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = ModuleWrapPolicy({nn.Linear})
    assert isinstance(policy, torch_private.Policy)
    assert set(torch_private.run_policy(policy, model)) == set(model)
    root = FSDP(model, sharding_strategy=SHARED, auto_wrap_policy=policy, use_orig_params=True, device_id=CPU)
    units = dict(torch_private.flat_units(root))
    assert [list(unit.names) for unit in units.values()] == [["weight", "bias"]] * 2
    unit = next(iter(units.values()))
    assert unit.shard.numel() == 10
    assert unit.replicas == (1, 0)
    assert list(unit.tied) == []
    assert all(unit.are_contiguous)
    root(torch.ones(1, 4))
    unit.reshard()
    assert torch_private.uses_original_parameters(root)
    assert torch_private.gradient_sync(root)
    assert torch_private.gradient_sync(model[0].module) is None
    with root.no_sync():
        assert not torch_private.gradient_sync(root)
        torch_private.set_gradient_sync(root, True)
        assert torch_private.gradient_sync(root)
        torch_private.set_gradient_sync(root, False)  # no_sync checks it
    inner: Any = root.module
    with FSDP.summon_full_params(root, writeback=False), torch_private.unit_forwards_skipped([root]):
        assert vars(root)["forward"] is inner
    assert "forward" not in vars(root)
    flat = FSDP(nn.Linear(2, 2), sharding_strategy=SHARED, device_id=CPU)
    return [name.rpartition(".")[2] for name, _ in flat.named_parameters()]


def layout() -> list[Any]:
    PartialState()
    root = FSDP(nn.Linear(2, 3), use_orig_params=True, device_id=CPU)
    ((path, unit),) = torch_private.flat_units(root)
    root(torch.ones(1, 2))
    unit.reshard()
    return [path, unit.is_sharded, unit.shard.numel(), unit.replicas, [unit.local_range(at) for at in (0, 1)]]


def test_flat_parameters_have_the_elements_of_each_rank(run):
    first, second = run(layout, processes=2)
    assert first == ["", True, 6, (1, 0), [(0, 0, 6), (0, 0, 0)]]
    assert second == ["", True, 6, (1, 0), [(0, 0, 0), (0, 2, 3)]]


def test_units_have_what_is_read(run):
    assert run(check_units, processes=2) == [[torch_private.FLAT_PARAMETER]] * 2


def replicated_layout() -> list[Any]:
    PartialState()
    kind = ShardingStrategy.NO_SHARD
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        root = FSDP(nn.Linear(2, 3), sharding_strategy=kind, use_orig_params=True, device_id=CPU)
    ((_, unit),) = torch_private.flat_units(root)
    return [unit.replicas, *(unit.local_range(at) for at in (0, 1))]


def test_padding_between_replicated_parameters_is_not_counted(run):
    """Torch aligns each parameter to 16 bytes: after 6 elements the next one begins at 8."""
    first, second = run(replicated_layout, processes=2)
    assert first == [(2, 0), (0, 0, 6), (0, 8, 3)]
    assert second == [(2, 1), (0, 0, 6), (0, 8, 3)]


def unreduced_gradients() -> tuple[list[float], ...]:
    """Those of several backward passes, each once, in the dtype of the reduction or of the computation."""
    PartialState()
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    for unit in (model[0], model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    model.set_requires_gradient_sync(False)

    def pass_twice() -> list[float]:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        return [gradient.float().sum().item() for gradient in torch_private.unreduced_gradients(model)]

    first = pass_twice()
    torch_private.drop_unreduced_gradients(model)
    dropped = [gradient.tolist() for gradient in torch_private.unreduced_gradients(model)]
    second = pass_twice()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 2)).sum().backward()
    reduced = [parameter.grad.full_tensor().sum().item() for parameter in model.parameters()]
    return first, dropped, second, reduced


def test_unreduced_gradients_are_listed_once_and_dropped(run):
    for first, dropped, second, reduced in run(unreduced_gradients, processes=2):
        assert len(first) == 3
        assert dropped == []
        assert second == first
        assert sum(reduced) == pytest.approx(sum(first) * 3 / 2, rel=0.01)


def take_gradients() -> list[Any]:
    """Gradients that are in no `grad`, taken from some parameters of a unit and from all of them."""
    PartialState()
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    parameters = list(model.parameters())
    found: list[Any] = []
    for disable in (model.set_requires_gradient_sync, model.set_requires_all_reduce):
        disable(False)
        model(torch.ones(1, 2)).sum().backward()
        total = sum_of(torch_private.unreduced_gradients(model))
        found.append(torch_private.TakenGradients([model], parameters[:1]).is_mixed)
        torch_private.drop_unreduced_gradients(model)
        for adds in (False, True):
            model(torch.ones(1, 2)).sum().backward()
            taken = torch_private.TakenGradients([model], parameters)
            assert taken
            assert not torch_private.unreduced_gradients(model)
            assert not taken.has_later
            model(torch.ones(1, 2)).sum().backward()
            assert taken.has_later
            taken.put_back(adds=adds)
            found.append(sum_of(torch_private.unreduced_gradients(model)) / total)
            torch_private.drop_unreduced_gradients(model)
        disable(True)
    return found


def sum_of(gradients: list[torch.Tensor]) -> float:
    return sum(gradient.sum().item() for gradient in gradients)


def test_unreduced_gradients_are_taken_and_put_back(run):
    assert run(take_gradients, processes=2) == [[False, 1.0, 2.0, True, 1.0, 2.0]] * 2
