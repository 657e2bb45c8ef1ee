"""prepare and its relatives on one process."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import accelerate.accelerator
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.plugins import TERecipeKwargs
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)

pytestmark = pytest.mark.usefixtures("states")


def training_objects() -> tuple[
    torch.nn.Linear, torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR, DataLoader
]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, scheduler, DataLoader(torch.arange(4.0).reshape(4, 1))


def test_prepare_returns_objects_in_the_order_given() -> None:
    model, optimizer, scheduler, loader = training_objects()
    accelerator = Accelerator(cpu=True)
    objects = accelerator.prepare("text", scheduler, loader, None, optimizer, model)
    kinds = [type(obj) for obj in objects]
    assert kinds[0] is str
    assert kinds[1] is AcceleratedScheduler
    assert isinstance(objects[2], DataLoader)
    assert kinds[3] is type(None)
    assert kinds[4] is AcceleratedOptimizer
    assert kinds[5] is torch.nn.Linear


def test_nothing_is_prepared_twice() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*training_objects())
    assert all(a is b for a, b in zip(accelerator.prepare(*prepared), prepared, strict=True))
    assert [len(objects) for objects in (accelerator._models, accelerator._optimizers)] == [1, 1]
    assert [len(objects) for objects in (accelerator._schedulers, accelerator._dataloaders)] == [1, 1]


def test_a_scheduler_follows_its_own_optimizer_only() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda step: 1.0)
    *_, prepared_second, prepared_scheduler = accelerator.prepare(first, second, *optimizers, scheduler)[2:]
    assert prepared_scheduler.optimizers == [prepared_second]


def test_wrong_whole_matrices_are_refused() -> None:
    model, optimizer, _, _ = training_objects()
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="it is for all optimizers of the call"):
        accelerator.prepare(model, optimizer, whole_matrices=[True])  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="none of the objects is an optimizer that is not prepared"):
        accelerator.prepare(model, whole_matrices=True)
    optimizer = accelerator.prepare(optimizer, whole_matrices=True)
    with pytest.raises(ConfigurationError, match="none of the objects is an optimizer that is not prepared"):
        accelerator.prepare(optimizer, whole_matrices=False)


def test_device_placement_must_fit() -> None:
    with pytest.raises(ConfigurationError, match="1 entries for 2 objects"):
        Accelerator(cpu=True).prepare("a", "b", device_placement=[True])


def test_unplaced_models_stay_where_they_are() -> None:
    accelerator = Accelerator(cpu=True, device_placement=False)
    assert next(accelerator.prepare(torch.nn.Linear(1, 1, device="meta")).parameters()).is_meta
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, device="meta")
    assert next(accelerator.prepare(model, device_placement=[False]).parameters()).is_meta


def test_evaluation_mode_prepares_a_model() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    assert accelerator.prepare_model(model, device_placement=False, evaluation_mode=True) is model
    assert accelerator._models == [model]


def test_clients_may_replace_parts_on_class_and_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    original = Accelerator.prepare_model

    def prepare_model(
        self: Accelerator, model: torch.nn.Module, *args: object, **kwargs: object
    ) -> torch.nn.Module:
        seen.append("model")
        return original(self, model, *args, **kwargs)  # type: ignore[arg-type]

    def prepare_data_loader(loader: DataLoader, *args: object, **kwargs: object) -> DataLoader:
        seen.append(sorted(kwargs))
        return loader

    monkeypatch.setattr(Accelerator, "prepare_model", prepare_model)
    monkeypatch.setattr(accelerate.accelerator, "prepare_data_loader", prepare_data_loader)
    Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1), DataLoader([1]))
    names, what = seen
    assert what == "model"
    assert {"num_processes", "process_index", "torch_device_mesh"} <= set(names)  # type: ignore[call-overload]


def test_prepare_works_after_free_memory() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*training_objects())
    models = accelerator._models
    assert accelerator.free_memory(optimizer, scheduler) == [None, None]
    assert accelerator._models is models
    assert models == []
    assert accelerator.prepare(model) is model
    assert accelerator.clear() == []
    assert models == []


def test_prepared_objects_copy_and_pickle() -> None:
    accelerator = Accelerator(cpu=True)
    for obj in accelerator.prepare(*training_objects())[:2]:
        assert type(copy.deepcopy(obj)) is type(obj)
        assert type(pickle.loads(pickle.dumps(obj))) is type(obj)
    loader = accelerator.prepare(DataLoader(torch.arange(4.0)))
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 4
    assert copy.deepcopy(accelerator) is accelerator


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0).reshape(4, 2))

    def __len__(self) -> int:
        return 4


PICKLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"mixed_precision": "bf16"},
    "accumulating": {"gradient_accumulation_steps": 2},
    "compiled": {"dynamo_backend": "eager"},
    "dispatched": {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    "seedable": {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)},
    "stateful": {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)},
    "handlers": {"kwargs_handlers": [AutocastKwargs(), GradScalerKwargs(), DistributedDataParallelKwargs()]},
}


def train(accelerator: Accelerator) -> list[float]:
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    (scheduler,), (loader,) = accelerator._schedulers, accelerator._dataloaders
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it in its constructor
@pytest.mark.parametrize("kind", PICKLED)
@pytest.mark.parametrize("dataset", [torch.arange(8.0).reshape(4, 2), Counting()], ids=["mapped", "stream"])
def test_an_accelerator_can_be_pickled_with_all_that_is_prepared(
    kind: str, dataset: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it is not set
    accelerator = Accelerator(cpu=True, **PICKLED[kind])
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    accelerator.prepare(model, optimizer, scheduler, DataLoader(dataset, batch_size=2))
    train(accelerator)
    pickled = pickle.dumps(accelerator)
    copied = pickle.loads(pickled)
    assert copied is not accelerator
    assert copied._models[0] is not accelerator._models[0]
    assert train(copied) == train(accelerator)
    assert copied._schedulers[0].get_last_lr() == accelerator._schedulers[0].get_last_lr()
    for _ in accelerator._dataloaders[0]:
        assert len(train(pickle.loads(pickle.dumps(accelerator)))) == 2
    copied._optimizers[0].param_groups[0]["lr"] = 7.0
    assert accelerator._optimizers[0].param_groups[0]["lr"] != 7.0


@pytest.mark.slow
def test_a_process_without_a_run_reads_a_pickled_accelerator(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(*training_objects()[:2])
    (tmp_path / "pickled").write_bytes(pickle.dumps(accelerator))
    program = (
        "import pickle, pathlib, sys; a = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes());"
        "a.print(a.device, a.num_processes, a.mixed_precision, a.is_main_process, len(a._optimizers))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "pickled")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["cpu", "1", "bf16", "True", "1"], ran.stderr


def test_settings_may_be_assigned_between_prepares() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    assert not accelerator.dataloader_config.even_batches
    accelerator.dataloader_config.split_batches = True
    assert accelerator.split_batches
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")
    assert accelerator.scaler is not None


def test_a_second_accelerator_must_agree_on_the_number_format() -> None:
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    with pytest.raises(ValueError, match="mixed_precision"):
        Accelerator(cpu=True, mixed_precision="no")


def test_a_refused_configuration_does_not_affect_the_next_run() -> None:
    with pytest.raises(ConfigurationError, match="fp8"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"


def test_disagreement_with_the_environment_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with caplog.at_level(logging.WARNING):
        assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    assert "ACCELERATE_MIXED_PRECISION='bf16'" in caplog.text


def test_views_of_a_plain_run() -> None:
    accelerator = Accelerator(cpu=True, project_dir="here")
    assert str(accelerator.device) == "cpu"
    assert accelerator.distributed_type == "NO"
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (
        1,
        0,
        0,
    )
    assert not accelerator.use_distributed
    assert not accelerator.multi_device
    assert accelerator.is_main_process
    assert accelerator.project_dir == accelerator.logging_dir == "here"
    assert accelerator.save_iteration == 0
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert accelerator.deepspeed_plugin is None
    assert not accelerator.is_fsdp2
    assert not accelerator.is_composable_parallelism_enabled
    ranks = ("tensor", "pipeline", "context", "data")
    assert [getattr(accelerator, f"{axis}_parallel_rank") for axis in ranks] == [0, 0, 0, 0]
    assert accelerator.data_parallel_shard_rank == 0
    assert accelerator.should_save_model
    assert accelerator.fp8_backend.value == "NO"
    assert accelerator.scaler is None


def test_the_label_may_be_assigned() -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState().distributed_type = "MULTI_GPU"
    assert accelerator.distributed_type == "MULTI_GPU"
    assert accelerator.prepare(torch.nn.Linear(1, 1))(torch.ones(1, 1)).shape == (1, 1)


def test_prepare_calls_the_methods_that_clients_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"):
        replaced = getattr(Accelerator, name)

        def replacement(self: Any, *args: Any, replaced: Any = replaced, name: str = name) -> Any:
            calls.append(name)
            return replaced(self, *args)

        monkeypatch.setattr(Accelerator, name, replacement)
    Accelerator(cpu=True).prepare(*training_objects())
    assert calls == ["prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"]


def test_a_plain_loop_trains_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler, loader = accelerator.prepare(*training_objects())
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert not accelerator.optimizer_step_was_skipped


def test_one_process_does_not_shard(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert "there is one: the model is trained whole" in caplog.text
    assert not hasattr(accelerator.state, "fsdp_plugin")  # clients take the attribute for a sharded run
    assert not accelerator.is_fsdp2
    model = torch.nn.Linear(2, 2)
    assert accelerator.prepare(model) is model


@pytest.mark.parametrize("launched_with", ["no", "fp16", None])
def test_a_second_accelerator_takes_the_number_format_of_the_run(
    launched_with: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched_with:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched_with)
    Accelerator(mixed_precision="bf16", cpu=True)
    assert Accelerator().mixed_precision == "bf16"
    with pytest.raises(ValueError, match="already runs with mixed_precision='bf16'") as error:
        Accelerator(mixed_precision="no")
    assert "_reset_state" not in str(error.value)


def test_a_second_accelerator_with_another_mesh_raises_an_error() -> None:
    Accelerator(cpu=True)
    Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    with pytest.raises(ValueError, match="already runs with parallelism_config=None"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))


@pytest.mark.parametrize(
    "name",
    ["num_processes", "device", "mixed_precision", "distributed_type", "state.num_processes", "state.device"]
    + ["state.mixed_precision", "state.distributed_type"],
)
def test_the_state_of_an_accelerator_from_before_a_reset_raises_an_error_with_the_fix(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    before = attrgetter(name)(accelerator)
    AcceleratorState._reset_state()
    fix = (
        r"`AcceleratorState\._reset_state\(\)` was called .* Create a new `Accelerator` or `AcceleratorState`"
    )
    with pytest.raises(AttributeError, match=fix) as error:
        attrgetter(name)(accelerator)
    assert f"has no attribute {name.rpartition('.')[2]!r}" in str(error.value)
    Accelerator(cpu=True)
    assert attrgetter(name)(accelerator) == before
