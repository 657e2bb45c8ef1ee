"""Models that the user has sharded train as on one process, with the meshes and placements that they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.stand_ins.cases import call_for_each
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import PreparationError, StateError
from accelerate.checkpointing import find_shards
from accelerate.local_sgd import LocalSGD
from accelerate.utils import GradientAccumulationPlugin

Run = Callable[..., list[Any]]
SAMPLES, BATCH = 24, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.narrow(torch.relu(self.wide(self.norm(x))))
        return x + hidden


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.base(x) + self.up(self.down(x))
        return hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def apply_plan(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


def shard_units(model: Net, mesh: DeviceMesh | None, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def attach_adapters(model: Net) -> None:
    """Attaches an adapter that starts with other values on each rank."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    model.head = Adapted(model.head)  # type: ignore[assignment]


def shard(model: Net, layout: str) -> None:
    if not dist.is_initialized():  # in one process, which the Accelerator does not initialize
        dist.init_process_group("gloo")
    size = dist.get_world_size()
    if layout == "units":
        shard_units(model, None)
    elif layout == "hybrid":
        shard_units(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "replicas of shards":  # the user averages over one dimension only
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        shard_units(model, mesh["shard"])
    elif layout == "plan":
        apply_plan(model, init_device_mesh("cpu", (size,)))
    elif layout == "plan and replicas":
        apply_plan(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))["model"])
    elif layout == "plan outside":
        apply_plan(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tp", "data"))["tp"])
    elif layout == "plan and units":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        apply_plan(model, mesh["tp"])
        shard_units(model, mesh["dp"], reshard_after_forward=False)
    elif layout == "one unit":
        fully_shard(model.blocks[1])
    elif layout == "two meshes":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model.blocks[1])
        fully_shard(model.head)


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


def samples() -> list[tuple[torch.Tensor, int]]:
    rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return [(row, index % 3) for index, row in enumerate(rows)]


def build(accelerator: Accelerator, layout: str, adapters: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    if layout:
        shard(model, layout)
    if adapters:
        attach_adapters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]
    return accelerator.prepare(model, optimizer, loader)  # type: ignore[no-any-return]


def train(
    layout: str,
    adapters: bool = False,
    steps: int = 1,
    norm: float = 2.0,
    syncs_early: bool = False,
    has_plugin: bool = False,
    tp_size: int = 1,
) -> dict[str, Any]:
    """Trains on global batches of 8 samples, whatever the number of ranks, and returns what a user sees."""
    accumulation = GradientAccumulationPlugin(steps, sync_each_batch=syncs_early)
    accelerator = Accelerator(
        gradient_accumulation_plugin=accumulation,
        split_batches=True,
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if layout and has_plugin else None,
        parallelism_config=ParallelismConfig(tp_size=tp_size) if layout and tp_size > 1 else None,
    )
    model, optimizer, loader = build(accelerator, layout, adapters)
    norms, losses = [], []
    for _ in range(2):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                logits = model(rows)
                loss = nn.functional.cross_entropy(logits, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5, norm)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    numbers = accelerator.prepare(DataLoader(range(13), batch_size=4))  # type: ignore[arg-type]
    state = accelerator.get_state_dict(model)
    return {
        "norms": norms,
        "losses": losses,
        "metrics": [n for batch in numbers for n in accelerator.gather_for_metrics(batch).tolist()],
        "weights": {name: whole(value) for name, value in model.state_dict().items()},
        "state": {name: value.shape for name, value in state.items()},
        "kinds": sorted({type(each).__name__ for each in model.modules()}),
    }


def resume(layout: str, folder: Path, precision: str) -> None:
    """Saves after two steps, trains on, loads, and trains the same steps again."""
    accelerator = Accelerator(mixed_precision=precision, cpu=True, split_batches=True)
    model, optimizer, loader = build(accelerator, layout, True)

    def step_through() -> list[float]:
        losses = []
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses

    step_through()
    accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, folder / "model", max_shard_size="1KB")
    first = step_through()
    accelerator.load_state(str(folder / "state"))
    assert step_through() == first
    assert accelerator.unwrap_model(model) is model
    accelerator.free_memory()


def weights_of(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint, loaded into another layout, which are those of `save_model`."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    model, _, _ = build(accelerator, layout, True)
    accelerator.load_state(str(folder / "state"))
    assert (folder / "model" / "model.safetensors.index.json").exists()
    saved = {name: value for path in find_shards(folder / "model") for name, value in load_file(path).items()}
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, saved[name], atol=0, rtol=0)
    return weights


class Scaled(nn.Module):
    """A block whose scale each rank uses for the part of the rank, or for whole values, before a head."""

    def __init__(self, is_inside: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wide, self.narrow, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.scale, self.is_inside = nn.Parameter(torch.tensor(0.5)), is_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, outer = (self.scale, 1.0) if self.is_inside else (1.0, self.scale)
        logits: torch.Tensor = self.head(self.narrow((self.wide(x) * inner).tanh()) * outer)
        return logits


def train_scaled(is_inside: bool, has_part: bool) -> str:
    """Trains with layers over 2 of 4 ranks, and returns the error of the first backward pass, or none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model: Any = Scaled(is_inside)
    plan: dict[str, Any] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan | ({"head": ColwiseParallel()} if has_part else {}))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    try:
        accelerator.backward(model(x).square().mean())
    except StateError as error:
        return str(error)
    return ""


def test_ranks_of_one_batch_are_compared_before_gradients_are_averaged(run: Run) -> None:
    cases = [(False, False), (True, False), (False, True)]
    for right, inside, part in run(call_for_each, train_scaled, cases, processes=4):
        assert right == ""
        assert "have different gradients of scale, which each rank has as a whole" in inside
        assert "compute different losses of the same batch" in part


@pytest.mark.parametrize(
    ("layout", "processes", "other", "precision"),
    [
        ("plan", 2, "units", "bf16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("units", 2, "", "no"),
                ("plan and units", 4, "units", "no"),
                ("hybrid", 4, "plan", "no"),
                ("two meshes", 4, "", "fp16"),
                ("units", 2, "one unit", "fp16"),
                ("plan and replicas", 4, "hybrid", "bf16"),
            ]
        ),
    ],
)
def test_checkpoints_load_on_the_same_and_on_another_layout(
    run: Run, tmp_path: Path, layout: str, processes: int, other: str, precision: str
) -> None:
    run(resume, layout, tmp_path, precision, processes=processes, timeout=180)
    run(weights_of, tmp_path, other, processes=2 if other else 1, timeout=180)


def prepare_late() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(8)))  # type: ignore[arg-type]
    model = Net()
    shard(model, "plan")
    with pytest.raises(PreparationError, match="Net work on 1 batches at a time .* for 2"):
        accelerator.prepare(model)
    assert len(loader) == 4
    with pytest.raises(ValueError, match="join_uneven_inputs does not work with FSDP or"):
        units = Net()
        shard(units, "units")
        with accelerator.join_uneven_inputs([accelerator.prepare(units)]):
            pass


def prepare_by_mesh() -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    with pytest.raises(ValueError, match="dp_shard_size=2: no plugin .* of Net .* Pass fsdp_plugin"):
        accelerator.prepare(Net())
    model = Net()
    shard(model, "units")
    assert accelerator.prepare(model) is model


def count_all_reduces() -> list[int]:
    """Returns the number of all-reduces over replicas in each micro-batch of a window."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    accumulation = GradientAccumulationPlugin(3, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=accumulation, cpu=True)
    model = Net()
    shard(model, "hybrid")
    model = accelerator.prepare(model)
    counts, calls = [], [0]
    original = _fsdp_collectives.dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_collectives.dist, "all_reduce", count)
        for _ in range(3):
            calls[0] = 0
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 8)).sum())
            counts.append(calls[0])
    return counts


@pytest.mark.slow
def test_replicas_of_shards_are_averaged_once_in_a_window(run: Run) -> None:
    assert run(count_all_reduces, processes=4) == [[0, 0, 3]] * 4  # one for each unit


class Counter(nn.Module):
    """A module with a state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"count": 3}


def gather_extra_states(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    shard(model, "units")
    model.counter = Counter()
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert state["counter._extra_state"] == {"count": 3}
    accelerator.save_model(model, folder, safe_serialization=False)
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))


def test_extra_states_of_sharded_models_are_kept(run: Run, tmp_path: Path) -> None:
    run(gather_extra_states, tmp_path)


def step_schedule_and_generate() -> None:
    """Steps a schedule, and runs a different number of forwards on each rank."""
    accelerator = Accelerator(cpu=True)
    model = Net()
    shard(model, "plan")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]  # both ranks work on one batch
    torch.manual_seed(0)
    units = Net()
    expected = units(torch.ones(1, 8)).detach()
    shard(units, "units")
    prepared = accelerator.prepare_model(units, evaluation_mode=True)
    with accelerator.unsharded(prepared):
        for _ in range(1 + accelerator.process_index):
            torch.testing.assert_close(prepared(torch.ones(1, 8)), expected)
    torch.testing.assert_close(prepared(torch.ones(1, 8)), expected)


def test_schedules_and_forwards_of_single_ranks(run: Run) -> None:
    run(step_schedule_and_generate)


def prepare_again() -> None:
    """Prepares a schedule before its model, and the model again with a loader and without one."""
    accelerator = Accelerator(cpu=True)
    model = Net()
    shard(model, "plan")
    experts = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), experts, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    assert schedule.num_processes == 2
    accelerator.prepare(model)
    assert schedule.num_processes == 1
    accelerator.free_memory()
    _, loader = accelerator.prepare(model, DataLoader(range(8)))  # type: ignore[arg-type]
    assert len(loader) == 8
    accelerator.free_memory()
    plain = accelerator.prepare(nn.Linear(2, 2))
    LocalSGD(accelerator, plain, 2)  # refused for sharded models only
    accelerator.free_memory()
    holder = nn.ParameterList([weight])
    accelerator.prepare_model(holder, evaluation_mode=True)
    accelerator.free_memory()
    accelerator.prepare(holder)
    accelerator.backward(weight.to_local().sum())  # the sum over two batches
    assert weight.grad is not None
    assert weight.grad.to_local().tolist() == [0.5, 0.5]


def test_models_are_prepared_again(run: Run) -> None:
    run(prepare_again)


def keep_part_of_a_mesh() -> None:
    """Prepares a model with a unit that is averaged over one of two ranks."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = Net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.blocks[0], mesh=mesh["shard"])
    with pytest.raises(PreparationError, match="Net.blocks.0 is already sharded by fully_shard"):
        accelerator.prepare(model)


def test_units_that_the_plugin_does_not_complete_are_refused(run: Run) -> None:
    run(keep_part_of_a_mesh)


def replace_layers() -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    shard(model, "units")

    def convert(model: Net) -> Net:
        model.head = nn.Linear(8, 3)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator._runtime.strategy.precision, "convert", convert)
        with pytest.raises(PreparationError, match="mixed_precision='no' replaces layers of FSDPNet"):
            accelerator.prepare(model)


def test_precisions_that_replace_sharded_layers_are_refused(run: Run) -> None:
    run(replace_layers)


def leave_a_rank_out() -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    apply_plan(model, DeviceMesh("cpu", [0], mesh_dim_names=("tp",)))
    with pytest.raises(PreparationError, match="Net is sharded over a mesh without rank 1, and all 2 ranks"):
        accelerator.prepare(model)


def test_a_mesh_without_a_rank_is_refused_on_all_ranks(run: Run) -> None:
    run(leave_a_rank_out)


def train_after_forward(layout: str) -> dict[str, torch.Tensor]:
    """Trains a model of which a forward has left a unit gathered before its optimizer is created."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    torch.manual_seed(0)
    model = Net()
    if layout:
        shard(model, layout)
    with torch.no_grad():
        model(torch.ones(1, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for rows, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(model(rows), labels))
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("layout", "processes"), [("units", 2), pytest.param("replicas of shards", 4, marks=pytest.mark.slow)]
)
def test_units_that_a_forward_left_gathered_train(run: Run, layout: str, processes: int) -> None:
    (expected,) = run(train_after_forward, "", processes=1)
    for weights in run(train_after_forward, layout, processes=processes, timeout=180):
        assert_equal(weights, expected)


def train_by_items(layout: str) -> list[float]:
    """Returns the gradient norms of windows with counted items, whose gradients are reduced early."""
    plugin = GradientAccumulationPlugin(3, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, split_batches=True, cpu=True)
    model, optimizer, loader = build(accelerator, layout, False)
    norms = []
    for rows, labels in [*loader, *loader]:
        with accelerator.accumulate(model, num_items=labels.sum()):
            losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
            accelerator.backward((losses * labels).sum())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(
    ("layout", "processes"), [("units", 2), pytest.param("replicas of shards", 4, marks=pytest.mark.slow)]
)
def test_items_are_counted_in_windows_that_reduce_early(run: Run, layout: str, processes: int) -> None:
    (expected,) = run(train_by_items, "", processes=1)
    assert len(expected) == 2
    for norms in run(train_by_items, layout, processes=processes, timeout=180):
        assert norms == pytest.approx(expected, rel=1e-4)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.net = nn.Embedding(16, 8, sparse=True), Net()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(self.embedding(ids))
        return logits


def train_sparse(is_sharded: bool) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, split_batches=True)
    torch.manual_seed(0)
    model = Tokens()
    if is_sharded:
        fully_shard(model.net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(index % 16, index % 3) for index in range(SAMPLES)]
    model, optimizer, loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(data, batch_size=BATCH),  # type: ignore[arg-type]
    )
    for ids, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(model(ids), labels))
        assert model.embedding.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value) for name, value in model.state_dict().items()}


def test_sparse_gradients_beside_shards_are_averaged(run: Run) -> None:
    (expected,) = run(train_sparse, False, processes=1)
    for weights in run(train_sparse, True):
        assert_equal(weights, expected)


class Average:
    """Moving average of the parameters of a model, which has their placements."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


def load_average(layout: str, folder: Path, saves: bool) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model, _, _ = build(accelerator, layout, False)
    average = Average(accelerator.unwrap_model(model))
    accelerator.register_for_checkpointing(average)
    if saves:
        accelerator.save_state(str(folder / "state"))
    for value in average.shadow.values():
        value.zero_()
    accelerator.load_state(str(folder / "state"))
    return {name: whole(value) for name, value in average.shadow.items()}


def test_registered_objects_with_shards_are_saved_whole(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = {name: value.detach() for name, value in Net().named_parameters()}
    for layout, processes, saves in [("units", 2, True), ("plan", 2, False), ("units", 1, False)]:
        for weights in run(load_average, layout, tmp_path, saves, processes=processes):
            assert_equal(weights, expected)


def test_one_process_trains_and_saves_what_it_has_sharded(run: Run, tmp_path: Path) -> None:
    (expected,) = run(train, "", processes=1)
    for layout in ("units", "plan"):
        (found,) = run(train, layout, processes=1)
        assert_equal(found["weights"], expected["weights"])
        assert found["state"] == expected["state"]
        run(resume, layout, tmp_path / layout, "no", processes=1)
        run(weights_of, tmp_path / layout, "", processes=1)


def test_a_mesh_that_shards_needs_a_plugin_or_a_sharded_model(run: Run) -> None:
    run(prepare_by_mesh)


def test_a_model_whose_ranks_read_other_batches_than_the_loaders_is_refused(run: Run) -> None:
    run(prepare_late)


def prepare_replicated() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    for placements in ([Replicate(), Replicate()], [Replicate(), Shard(0)]):
        model = nn.Linear(8, 8)
        weight = distribute_tensor(model.weight.detach(), mesh, placements)
        model.weight = nn.Parameter(weight)
        with pytest.raises(PreparationError, match=r"Linear: weight is replicated as a DTensor over ranks"):
            Accelerator().prepare(model)
        model.weight.requires_grad_(False)
        Accelerator().prepare(model)


def test_a_parameter_that_is_replicated_over_ranks_with_other_batches_is_refused(run: Run) -> None:
    run(prepare_replicated, processes=4)


EARLY = {"steps": 3, "syncs_early": True}
TWO = ["units", "plan", "one unit"]
FOUR = ["hybrid", "replicas of shards", "plan and replicas", "plan outside", "plan and units", "two meshes"]
CASES = [
    ("one unit", 2, {}),
    ("units", 2, {"adapters": True, "steps": 2}),
    pytest.param("plan and units", 4, {"steps": 2}, marks=pytest.mark.slow),
    ("units", 2, {"adapters": True, "has_plugin": True}),
    ("plan", 2, {"adapters": True, "tp_size": 2}),
    *(pytest.param(layout, 2, {}, marks=pytest.mark.slow) for layout in ("units", "plan")),
    pytest.param("plan and units", 4, {"has_plugin": True}, marks=pytest.mark.slow),
    pytest.param("replicas of shards", 4, {"has_plugin": True, "steps": 2}, marks=pytest.mark.slow),
    *(
        pytest.param(layout, 4, options, marks=pytest.mark.slow)
        for layout in [*TWO, *FOUR]
        for options in ({}, {"adapters": True}, {"steps": 2}, {"norm": float("inf")}, EARLY)
    ),
]


@pytest.mark.parametrize(("layout", "processes", "options"), CASES)
def test_training_is_that_of_one_process(
    run: Run, layout: str, processes: int, options: dict[str, Any]
) -> None:
    (expected,) = run(train_with, "", options, processes=1)
    for found in run(train_with, layout, options, processes=processes, timeout=180):
        assert found["metrics"] == list(range(13))
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5, abs=1e-6)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert "DistributedDataParallel" not in found["kinds"]
        assert_equal(found["weights"], expected["weights"])


def train_with(layout: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(layout, **options)
