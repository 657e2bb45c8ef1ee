"""Gradients on different meshes are clipped together, and models sharded by others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from accelerate import Accelerator
from accelerate.base import PreparationError
from accelerate.utils import FullyShardedDataParallelPlugin

Run = Callable[..., list[Any]]
SHAPES = [(5, 4), (3,), (4, 4), (1, 3), (2,)]


def on_meshes(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    """Shards over two meshes (one rank has none of the fourth), a replica, a plain one, and one unused."""
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    over = [
        (line, [Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Replicate()] * 2),
        (line, [Shard(0)]),
    ]
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements))
        for shape, (mesh, placements) in zip(SHAPES, over, strict=False)
    ]
    for parameter, gradient, (mesh, placements) in zip(parameters, gradients, over, strict=False):
        parameter.grad = distribute_tensor(gradient, mesh, placements)
    parameters[2].grad = DTensor.from_local(gradients[2] / 2, grid, [Replicate(), Partial()])
    plain, unused = nn.Parameter(torch.ones(SHAPES[4])), nn.Parameter(torch.ones(2))
    plain.grad = gradients[4].clone()
    return [*parameters, plain, unused]


def alone(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def check_equal(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for parameter, expected in zip(ours, theirs, strict=False):
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, expected.grad, atol=1e-6, rtol=1e-6)


def clip_on_meshes(sharded: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    gradients = [3 * torch.randn(shape) for shape in SHAPES]
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        ours, theirs = on_meshes(gradients), alone(gradients)
        norm = accelerator.clip_grad_norm_(iter(ours), 1.0, norm_type)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0, norm_type))
        check_equal(ours, theirs)
    ours = on_meshes(gradients)
    if accelerator.process_index == 1:
        ours[0].grad.to_local().fill_(float("nan"))  # type: ignore[union-attr]
    assert accelerator.clip_grad_norm_(ours, 1.0, float("inf")).isnan()
    ours, theirs = on_meshes(gradients), alone(gradients)
    accelerator.clip_grad_value_(ours, 0.5)
    nn.utils.clip_grad_value_(theirs, 0.5)
    check_equal(ours, theirs)


def test_gradients_on_different_meshes_are_clipped_as_on_one_process(run: Run) -> None:
    run(call_for_each, clip_on_meshes, [False, True])


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def shard_in_each_way() -> list[nn.Module]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    first, second = build(), build()
    fully_shard(first[1])
    parallelize_module(second, mesh, {"0": ColwiseParallel()})
    return [first, second, FullyShardedDataParallel(build(), device_id=torch.device("cpu"))]


def prepare_sharded(version: int | None) -> list[str]:
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(fsdp_plugin=plugin)
    errors = []
    # Without FSDP both are kept, and FSDP 2 keeps units.
    for model in shard_in_each_way()[{None: 2, 1: 0, 2: 1}[version] :]:
        with pytest.raises(PreparationError) as caught:
            accelerator.prepare(model)
        errors.append(str(caught.value))
    return errors


def test_models_that_are_sharded_already_are_refused(run: Run) -> None:
    versions = [None, 1, 2]
    for version, errors in zip(versions, run(call_for_each, prepare_sharded, versions)[0], strict=True):
        expected = ["Sequential.1 is already sharded by fully_shard"] if version == 1 else []
        expected += ["Sequential.0 is already distributed over a device mesh"] if version else []
        expected += ["FullyShardedDataParallel is already wrapped"]
        assert all(text in error for text, error in zip(expected, errors, strict=True)), version


def prepare_with_units_of_its_own() -> Any:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = build()
    fully_shard(model[1])
    prepared = accelerator.prepare(model)
    return prepared(torch.ones(1, 4)).shape


def test_units_of_a_model_are_kept_by_fsdp2(run: Run) -> None:
    assert run(prepare_with_units_of_its_own) == [(1, 4)] * 2
