"""Models whose layers are on different ranks train as on one process, under each schedule."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, PreparationError, StateError, is_torch_version
from accelerate.checkpointing import find_shards
from accelerate.utils import GradientAccumulationPlugin, PipelineConfig, broadcast_object_list

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]
SAMPLES, BATCH = 32, 16
SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"]


SIZES = {"ddp": "dp_replicate_size", "fsdp": "dp_shard_size", "tp": "tp_size"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: Tensor, *, scale: Tensor) -> tuple[Tensor]:
        return (hidden + scale * self.down(torch.relu(self.up(self.norm(hidden)))),)


class Net(nn.Module):
    """Embedding, blocks that get a tensor from the code around them, and a head, which may be tied."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(0.1 * torch.randn(4, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions
        scale = 1.0 + 0.1 * (ids == 0).unsqueeze(-1).float()
        for block in self.blocks:
            (added,) = block(hidden, scale=scale)
            hidden = 0.5 * hidden + added  # outside of the block that begins a stage
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def mean_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_accelerator(layout: str, schedule: str, processes: int, **options: Any) -> Accelerator:
    """Returns the accelerator of a layout, in which `processes` are the ranks of the run."""
    options.setdefault("split_batches", True)
    if processes == 1:
        return Accelerator(cpu=True, **options)
    sizes = {"": {}, "ddp": {"dp_replicate_size": 2}, "fsdp": {"dp_shard_size": 2}, "tp": {"tp_size": 2}}[
        layout
    ]
    # Five micro-batches have different sizes. DualPipeV needs one for each stage.
    config = PipelineConfig(schedule=schedule, microbatches=8 if schedule == "dualpipev" else 5)
    mesh = ParallelismConfig(pp_size=processes // (2 if layout else 1), pp_handler=config, **sizes)
    policy = partial(_is_block)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=policy, cpu_ram_efficient_loading=False
    )
    plugins = {"fsdp_plugin": plugin} if layout == "fsdp" else {}
    return Accelerator(cpu=True, parallelism_config=mesh, **plugins, **options)


def _is_block(module: nn.Module, recurse: bool = False, **_: Any) -> bool:
    return recurse or isinstance(module, Block)


def build(
    accelerator: Accelerator, is_tied: bool = False, samples: int = SAMPLES, batch_size: int = BATCH
) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net(is_tied)
    generator = torch.Generator().manual_seed(1)
    data = [
        {
            "ids": torch.randint(11, (4,), generator=generator),
            "targets": torch.randint(11, (4,), generator=generator),
        }
        for _ in range(samples)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(data, batch_size=batch_size)  # type: ignore[arg-type]
    return accelerator.prepare(model, optimizer, loader)  # type: ignore[no-any-return]


def train(
    layout: str, schedule: str, processes: int, steps: int = 1, norm: float = 2.0, is_tied: bool = False
) -> dict[str, Any]:
    accelerator = make_accelerator(layout, schedule, processes, gradient_accumulation_steps=steps)
    model, optimizer, loader = build(accelerator, is_tied)
    losses, norms = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = accelerator.forward_backward(model, batch, mean_loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5, norm)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss, "mean")))
    model.eval()
    with torch.inference_mode():
        pairs = [accelerator.gather_for_metrics((model(batch["ids"]), batch["targets"])) for batch in loader]
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "logits": torch.cat([logits for logits, _ in pairs]),
        "targets": torch.cat([targets for _, targets in pairs]),
        "state": {name: value.clone() for name, value in state.items()},
        "parameters": sum(parameter.numel() for _, parameter in model.named_parameters()),
    }


def train_global_batches(layout: str, processes: int) -> dict[str, Tensor]:
    """Train with micro-batches whose sizes differ between ranks and within a step."""
    plugin = GradientAccumulationPlugin(global_batch_size=16)
    accelerator = make_accelerator(
        layout, "1f1b", processes, split_batches=False, gradient_accumulation_plugin=plugin
    )
    model, optimizer, loader = build(accelerator, samples=29, batch_size=4)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.forward_backward(model, batch, mean_loss)
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("layout", "processes"),
    [("", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("ddp", 4), ("fsdp", 4)])],
)
def test_steps_of_a_constant_global_batch_are_those_of_one_process(
    run: Run, layout: str, processes: int
) -> None:
    (expected,) = run(train_global_batches, "", 1, processes=1)
    found = run(train_global_batches, layout, processes, processes=processes, timeout=120)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def train_global_batches_with_checks() -> dict[str, Tensor]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return train_global_batches("", 2)
    finally:
        dist.set_debug_level(level)


def test_sizes_of_micro_batches_may_differ_while_torch_checks_collectives(run: Run) -> None:
    """As TORCH_DISTRIBUTED_DEBUG=DETAIL requests."""
    (expected,) = run(train_global_batches, "", 1, processes=1)
    found = run(train_global_batches_with_checks, processes=2, timeout=120)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


CASES = [
    ("", "1f1b", 2, {"is_tied": True}),
    ("", "zbvzerobubble", 2, {"steps": 2}),
    pytest.param("fsdp", "interleavedzerobubble", 4, {}, marks=pytest.mark.slow),
    *(
        pytest.param(layout, schedule, processes, {"steps": steps}, marks=pytest.mark.slow)
        for schedule in SCHEDULES
        for layout, processes in [("", 2), ("", 4), ("ddp", 4), ("fsdp", 4), ("tp", 4)]
        for steps in (1, 2)
    ),
    pytest.param("ddp", "1f1b", 4, {"is_tied": True, "steps": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", "1f1b", 4, {"norm": float("inf")}, marks=pytest.mark.slow),
    pytest.param("fsdp", "1f1b", 4, {"is_tied": True, "steps": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", "zbvzerobubble", 4, {"is_tied": True}, marks=pytest.mark.slow),
    pytest.param("", "loopedbfs", 2, {"norm": float("inf")}, marks=pytest.mark.slow),
    pytest.param("", "dualpipev", 2, {"is_tied": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "schedule", "processes", "options"), CASES)
def test_training_is_that_of_one_process(
    run: Run, layout: str, schedule: str, processes: int, options: dict[str, Any]
) -> None:
    (expected,) = run(train_with, layout, schedule, 1, options, processes=1)
    found = run(train_with, layout, schedule, processes, options, processes=processes, timeout=180)
    for rank, each in enumerate(found):
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-6, abs=1e-6)
        assert each["norms"] == pytest.approx(expected["norms"], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(each["logits"], expected["logits"], atol=1e-5, rtol=1e-5)
        assert torch.equal(each["targets"], expected["targets"])
        assert each["parameters"] < expected["parameters"]
        assert list(each["state"]) == ([] if rank else list(expected["state"]))
        for name, value in each["state"].items():
            torch.testing.assert_close(value, expected["state"][name], atol=1e-5, rtol=1e-5)


def train_with(layout: str, schedule: str, processes: int, options: dict[str, Any]) -> dict[str, Any]:
    return train(layout, schedule, processes, **options)


def train_with_sums(layout: str, processes: int) -> dict[str, Tensor]:
    """Train with an optimizer that creates its state in its constructor."""
    accelerator = make_accelerator(layout, "1f1b", processes)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(BATCH * 4).view(BATCH, 4) % 11
    for _ in range(2):
        accelerator.forward_backward(model, {"ids": ids, "targets": ids.flip(0)}, mean_loss)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("layout", ["tp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_states_of_a_constructor_follow_the_shards_of_stages(run: Run, layout: str) -> None:
    (expected,) = run(train_with_sums, "", 1, processes=1)
    found = run(train_with_sums, layout, 4, processes=4, timeout=120)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def shard_a_stage_without_layers() -> tuple[int, list[str]]:
    """Shard stages of which the last has only the norm and the head.

    Returns the number of the units inside stages, and the warnings.
    """
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    config = PipelineConfig(microbatches=2, split=["norm"])
    mesh = ParallelismConfig(pp_size=2, dp_shard_size=2, pp_handler=config)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    accelerator = Accelerator(cpu=True, parallelism_config=mesh, fsdp_plugin=plugin)
    model = accelerator.prepare(Net())
    return sum(isinstance(module, FSDPModule) for module in model.modules()), warned


def test_a_stage_may_have_none_of_the_layers_that_fsdp_wraps(run: Run) -> None:
    assert run(shard_a_stage_without_layers, processes=4) == [(8, []), (8, []), (0, []), (0, [])]


# Checkpoints


def resume(layout: str, schedule: str, processes: int, folder: Path, saves: bool) -> list[float]:
    accelerator = make_accelerator(layout, schedule, processes)
    model, optimizer, loader = build(accelerator, is_tied=True)

    def step_through() -> list[float]:
        losses = []
        for batch in loader:
            losses.append(
                float(accelerator.reduce(accelerator.forward_backward(model, batch, mean_loss), "mean"))
            )
            optimizer.step()
            optimizer.zero_grad()
        return losses

    if saves:
        step_through()
        accelerator.save_state(str(folder / "state"))
        accelerator.save_model(model, folder / "model", max_shard_size="2KB")
        return step_through()
    accelerator.load_state(str(folder / "state"))
    return step_through()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("", "1f1b", 2), ("", "1f1b", 1)),
        (("", "1f1b", 1), ("", "zbvzerobubble", 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (("", "1f1b", 2), ("", "1f1b", 4)),
                (("", "zbvzerobubble", 2), ("ddp", "1f1b", 4)),
                (("fsdp", "1f1b", 4), ("fsdp", "interleaved1f1b", 4)),
                (("fsdp", "1f1b", 4), ("", "1f1b", 1)),
                (("tp", "1f1b", 4), ("", "1f1b", 2)),
                (("", "1f1b", 1), ("tp", "1f1b", 4)),
            ]
        ),
    ],
)
def test_checkpoints_load_with_another_number_of_stages(
    run: Run, tmp_path: Path, saved: tuple[str, str, int], loaded: tuple[str, str, int]
) -> None:
    first = run(resume, *saved, tmp_path, True, processes=saved[2], timeout=180)
    again = run(resume, *loaded, tmp_path, False, processes=loaded[2], timeout=180)
    assert again[0] == pytest.approx(first[0], rel=1e-6)
    weights = {name for path in find_shards(tmp_path / "model") for name in load_file(path)}
    names = set(Net().state_dict())
    assert weights | {"head.weight"} == names


def load_whole_weights(processes: int) -> list[float]:
    """Train, and load the weights of the first step again, as a program does without `load_state`."""
    accelerator = make_accelerator("", "1f1b", processes)
    model, optimizer, loader = build(accelerator, is_tied=True)
    losses, kept = [], {}
    for number in range(4):
        batch = next(iter(loader))
        losses.append(float(accelerator.forward_backward(model, batch, mean_loss)))
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            kept = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            kept = broadcast_object_list([kept])[0]
        elif number == 2:
            model.load_state_dict(kept)
    with pytest.raises(RuntimeError, match="unknown"):
        model.load_state_dict({**kept, "unknown": torch.ones(1)})
    return losses


def test_a_state_dict_of_the_whole_model_can_be_loaded(run: Run) -> None:
    (expected,) = run(load_whole_weights, 1, processes=1)
    assert run(load_whole_weights, 2, processes=2) == [pytest.approx(expected, rel=1e-5)] * 2


# Memory


class Alive(torch.autograd.Function):
    """Counts the micro-batches whose activations are alive."""

    now = most = 0

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled() or hidden.requires_grad:
            Alive.now += 1
            Alive.most = max(Alive.most, Alive.now)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Alive.now -= 1
        return gradients[0]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        counted: Tensor = Alive.apply(self.linear(hidden))  # type: ignore[no-untyped-call]
        return counted


def count_alive(schedule: str) -> int:
    config = PipelineConfig(schedule=schedule, microbatches=8)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    model = accelerator.prepare(nn.Sequential(Counted(), Counted()))
    accelerator.forward_backward(model, (torch.randn(8, 4), torch.randn(8, 4)), F.mse_loss)
    Alive.now = Alive.most = 0  # the first pass also traces the model
    accelerator.forward_backward(model, (torch.randn(8, 4), torch.randn(8, 4)), F.mse_loss)
    assert Alive.now == 0
    return Alive.most


@pytest.mark.parametrize(("schedule", "expected"), [("gpipe", [8, 8]), ("1f1b", [2, 1])])
def test_activations_are_kept_as_long_as_the_schedule_needs(
    run: Run, schedule: str, expected: list[int]
) -> None:
    assert run(count_alive, schedule, processes=2) == expected


def count_communication(layout: str, processes: int) -> list[dict[str, int]]:
    """Calls of torch.distributed in each micro-batch of a window of two, after three with comparisons."""
    accelerator = make_accelerator(layout, "1f1b", processes, gradient_accumulation_steps=2)
    model, optimizer, loader = build(accelerator)
    counts: list[dict[str, int]] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(torch.distributed, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[-1][name] = counts[-1].get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("P2POp", "all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast"):
            patch.setattr(torch.distributed, name, counting(name))
        for batch in chain(loader, loader, loader, loader):
            with accelerator.accumulate(model):
                counts.append({})
                accelerator.forward_backward(model, batch, mean_loss)
                optimizer.step()
                optimizer.zero_grad()
    return counts[6:]


@pytest.mark.parametrize(("layout", "processes"), [("", 2), pytest.param("fsdp", 4, marks=pytest.mark.slow)])
def test_communication_is_what_the_schedule_needs(run: Run, layout: str, processes: int) -> None:
    """Two tensors for each of 5 micro-batches and the loss. Gradients are exchanged once in a window."""
    for first, last in run(count_communication, layout, processes, processes=processes):
        for counts in (first, last):
            assert counts.pop("P2POp") == 2 * 5
            assert counts.pop("broadcast") == 1
        units = last.pop("reduce_scatter_single", 0)
        assert units == (0 if not layout else 5)
        assert first.pop("all_gather_single", 0) == last.pop("all_gather_single", 0) == units
        assert not first
        assert last == {"all_reduce": 2 if layout else 1}  # of the parameter outside of stages


def count_live_bytes() -> tuple[int, int]:
    """Bytes of all tensors of this process after `prepare`, and those of the whole model."""
    config = PipelineConfig(microbatches=2)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance reads deprecated attributes of other objects
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and not each.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values()), whole


def test_weights_of_other_stages_are_freed(run: Run) -> None:
    for live, whole in run(count_live_bytes, processes=2):
        assert whole / 2 <= live < 0.6 * whole


# Uneven batches, losses and errors


def own_rows(batch: dict[str, Tensor], layout: str, accelerator: Accelerator) -> dict[str, Tensor]:
    """Returns the samples of a batch for this rank, of which two have one half each in a layout."""
    return {k: v[accelerator.process_index % 2 :: 2] for k, v in batch.items()} if layout else batch


def train_sums(processes: int, steps: int, layout: str = "") -> list[float]:
    """Trains with sums over the tokens that count, whose number differs between micro-batches."""
    accelerator = make_accelerator(layout, "1f1b", processes, gradient_accumulation_steps=steps)
    model, optimizer, _ = build(accelerator)
    losses = []
    for size in (7, 3, 8, 5):
        generator = torch.Generator().manual_seed(size)
        batch = {name: torch.randint(11, (size, 4), generator=generator) for name in ("ids", "targets")}
        batch["targets"][0] = -100
        batch = own_rows(batch, layout, accelerator)
        count = int((batch["targets"] != -100).sum())
        with accelerator.accumulate(model, num_items=count):
            loss = accelerator.forward_backward(model, batch, sum_loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss, "mean")) * (2 if layout else 1))
    return losses


def sum_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


LAYOUTS = [("", 2), *(pytest.param(layout, 4, marks=pytest.mark.slow) for layout in ("ddp", "fsdp"))]


@pytest.mark.parametrize(("layout", "processes"), LAYOUTS)
@pytest.mark.parametrize("steps", [1, 2])
def test_sums_over_items_are_those_of_one_process(run: Run, steps: int, layout: str, processes: int) -> None:
    (expected,) = run(train_sums, 1, steps, processes=1)
    for found in run(train_sums, processes, steps, layout, processes=processes, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)


def train_in_windows(processes: int) -> list[float]:
    """Trains with means over batches, of which two make a window and the last one is alone."""
    accelerator = make_accelerator("", "1f1b", processes)
    accelerator.gradient_accumulation_steps = 2
    model, optimizer, _ = build(accelerator)
    rows = [{name: torch.arange(i, i + 4) % 11 for name in ("ids", "targets")} for i in range(12)]
    norms = []
    for window in accelerator.windows(accelerator.prepare(DataLoader(rows, batch_size=4))):
        for batch in window:
            accelerator.forward_backward(model, batch, mean_loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_means_in_windows_are_those_of_one_process(run: Run) -> None:
    (expected,) = run(train_in_windows, 1, processes=1)
    for found in run(train_in_windows, 2, processes=2):
        assert found == pytest.approx(expected, rel=1e-6)


def train_tied_in_windows(processes: int) -> list[float]:
    """Trains tied weights, where the fourth batch of a window is compared with one process."""
    plugin = GradientAccumulationPlugin(num_steps=6, sync_each_batch=True)
    accelerator = make_accelerator("", "1f1b", processes, gradient_accumulation_plugin=plugin)
    model, optimizer, _ = build(accelerator, is_tied=True)
    norms = []
    for number in range(6):
        batch = {name: (torch.arange(16).view(4, 4) + number) % 11 for name in ("ids", "targets")}
        with accelerator.accumulate(model):
            accelerator.forward_backward(model, batch, mean_loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def test_tied_weights_in_windows_train_as_on_one_process(run: Run) -> None:
    (expected,) = run(train_tied_in_windows, 1, processes=1)
    assert run(train_tied_in_windows, 2, processes=2) == [pytest.approx(expected, rel=1e-5)] * 2


class BatchError(Exception):
    """Error of a batch, which the program skips."""


def wrong_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    raise BatchError


def train_tied_with_an_error(processes: int, drops: bool) -> list[float]:
    """Adds up gradients of tied weights over backward passes, of which the fourth fails."""
    accelerator = make_accelerator("", "1f1b", processes)
    model, optimizer, _ = build(accelerator, is_tied=True)
    norms = []
    for number in range(6):
        batch = {name: (torch.arange(16).view(4, 4) + number) % 11 for name in ("ids", "targets")}
        if number == 3:  # is compared, so all ranks raise the error
            with pytest.raises((BatchError, PreparationError)):
                accelerator.forward_backward(model, batch, wrong_loss)
            if drops:
                optimizer.zero_grad()
        else:
            accelerator.forward_backward(model, batch, mean_loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))))
    return norms


@pytest.mark.parametrize("drops", [False, True])
def test_tied_weights_keep_their_gradients_when_a_later_batch_fails(run: Run, drops: bool) -> None:
    (expected,) = run(train_tied_with_an_error, 1, drops, processes=1)
    assert run(train_tied_with_an_error, 2, drops, processes=2) == [pytest.approx(expected, rel=1e-5)] * 2


def train_on_one_sample(schedule: str, processes: int) -> float:
    accelerator = make_accelerator("", schedule, processes)
    model, _, _ = build(accelerator)
    batch = {"ids": torch.arange(4)[None], "targets": torch.arange(4)[None]}
    loss = accelerator.forward_backward(model, batch, mean_loss)
    return float(loss) + float(accelerator.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES)]
)
def test_a_batch_of_one_sample_trains(run: Run, schedule: str) -> None:
    (expected,) = run(train_on_one_sample, schedule, 1, processes=1)
    assert run(train_on_one_sample, schedule, 2, processes=2) == pytest.approx([expected] * 2, rel=1e-6)


class Biased(nn.Module):
    """Adds a table for positions to the hidden states of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden)) + table
        return hidden


def train_with_tables(processes: int) -> list[float]:
    """Trains with tables that have as many rows as a micro-batch of some batches, and as the last batch."""
    config = PipelineConfig(microbatches=4)
    mesh = ParallelismConfig(pp_size=processes, pp_handler=config) if processes > 1 else None
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    torch.manual_seed(0)
    model = Biased()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for size, length in ((16, 4), (8, 4), (16, 4), (8, 4), (4, 4), (8, 6), (8, 8)):
        table = torch.arange(4.0 * length).view(length, 4) / 8
        batch = {"hidden": torch.randn(size, length, 4), "table": table, "weights": table[0]}

        def loss_fn(outputs: Tensor, target: dict[str, Tensor]) -> Tensor:
            return (outputs.square() * target["weights"]).mean()

        losses.append(float(accelerator.forward_backward(model, batch, loss_fn)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


class WithTable(Biased):
    """Returns its table, too."""

    def forward(self, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(hidden, table), table * 2


def evaluate_with_tables() -> list[list[int]]:
    mesh = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    model = Accelerator(cpu=True, parallelism_config=mesh).prepare(WithTable())
    model.eval()
    return [list(model(torch.ones(size, 4, 4), torch.ones(4, 4))[1].shape) for size in (16, 8, 4)]


def test_outputs_with_as_many_rows_as_a_micro_batch_are_not_joined(run: Run) -> None:
    assert run(evaluate_with_tables, processes=2) == [[[4, 4]] * 3] * 2


def test_tables_with_as_many_rows_as_a_batch_are_not_split(run: Run) -> None:
    (expected,) = run(train_with_tables, 1, processes=1)
    assert run(train_with_tables, 2, processes=2) == [pytest.approx(expected, rel=1e-5)] * 2


class Noisy(nn.Module):
    """Draws random numbers between layers, which the first and the last stage use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, values: Tensor) -> Tensor:
        noise = torch.randn_like(values) * self.dropout(torch.ones_like(values))
        signs = torch.empty(len(values), dtype=torch.long).random_(2)
        hidden = values + noise * signs[:, None]
        added = hidden
        for block in self.blocks:
            if self.training and torch.rand([]) < 0.0:  # such as a layer drop without a probability
                continue
            added = 0.5 * added + 0.0 * block(added)
        return 16 * added - values - noise * signs[:, None]


def train_with_noise() -> list[float]:
    mesh = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    model = accelerator.prepare(Noisy())
    batch = (torch.randn(4, 4), torch.zeros(4, 4))
    losses = [float(accelerator.forward_backward(model, batch, F.mse_loss)) for _ in range(3)]
    model.eval()
    return [*losses, float(model(batch[0]).abs().max())]


def test_stages_use_the_same_random_numbers_of_the_code_between_layers(run: Run) -> None:
    for errors in run(train_with_noise):
        assert max(errors) < 1e-5


def train_in_float64(processes: int) -> list[float]:
    torch.set_default_dtype(torch.float64)
    accelerator = make_accelerator("", "1f1b", processes)
    model, _, loader = build(accelerator)
    return [float(accelerator.forward_backward(model, batch, mean_loss)) for batch in loader]


def test_all_ranks_know_the_loss_with_another_default_dtype(run: Run) -> None:
    (expected,) = run(train_in_float64, 1, processes=1)
    assert run(train_in_float64, 2, processes=2) == [pytest.approx(expected, rel=1e-6)] * 2


def train_layers_later(kind: str, processes: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train the blocks of the first stage from the second step on, and then no embedding any more."""
    accelerator = make_accelerator("", "1f1b", processes)
    torch.manual_seed(0)
    model: Any = Net()
    model.blocks[:2].requires_grad_(False)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    made: Any = torch.optim.Muon(matrices) if kind == "muon" else torch.optim.SGD(matrices, lr=0.1)
    model, optimizer = accelerator.prepare(model, made)
    batch = {"ids": torch.arange(32).view(8, 4) % 11, "targets": torch.arange(32).view(8, 4) % 7}
    losses = []
    for step in range(5):
        if step == 1:
            model.blocks[:2].requires_grad_(True)
        if step == 3:
            model.tokens.requires_grad_(False)
        losses.append(float(accelerator.forward_backward(model, batch, mean_loss)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("kind", ["sgd", "muon"])
def test_layers_of_one_stage_may_be_trained_later(run: Run, kind: str) -> None:
    ((losses, state),) = run(train_layers_later, kind, 1, processes=1)
    results = run(train_layers_later, kind, 2, processes=2)
    assert [found for found, _ in results] == [pytest.approx(losses, rel=1e-5)] * 2
    torch.testing.assert_close(results[0][1], state, rtol=1e-4, atol=1e-6)


def train_new_group(folder: Path, processes: int, layout: str = "") -> list[float]:
    """Trains blocks of both stages from the second step on, in a group that is added."""
    accelerator = make_accelerator(layout, "1f1b", processes)
    torch.manual_seed(0)
    model: Any = Net()
    model.blocks[1:3].requires_grad_(False)
    adam = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad])
    model, optimizer = accelerator.prepare(model, adam)
    batch = {"ids": torch.arange(32).view(8, 4) % 11, "targets": torch.arange(32).view(8, 4) % 7}
    batch = own_rows(batch, layout, accelerator)
    losses = []

    def compute() -> None:
        loss = accelerator.forward_backward(model, batch, mean_loss)
        losses.append(float(accelerator.reduce(loss, "mean")))

    for step in range(4):
        if step == 1:
            model.blocks[1:3].requires_grad_(True)
            optimizer.add_param_group({"params": model.blocks[1:3].parameters(), "lr": 0.1})
        compute()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    compute()
    optimizer.step()
    optimizer.zero_grad()
    compute()
    return losses


@pytest.mark.parametrize(("layout", "processes"), LAYOUTS)
def test_an_added_group_has_parameters_of_several_stages(
    run: Run, tmp_path: Path, layout: str, processes: int
) -> None:
    (expected,) = run(train_new_group, tmp_path / "whole", 1, processes=1)
    stages = tmp_path / "stages"
    for found in run(train_new_group, stages, processes, layout, processes=processes, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)


def name_parameters(folder: Path, processes: int) -> bool:
    """Saves whole states on one process, and loads them on several."""
    accelerator = make_accelerator("", "1f1b", processes)
    model: Any = Net()
    blocks = model.blocks[2:6]
    blocks.requires_grad_(False)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(named))
    optimizer.add_param_group({"params": [(f"blocks.{i + 2}.up.bias", blocks[i].up.bias) for i in range(4)]})
    if processes == 1:
        accelerator.save_state(str(folder))
    else:
        accelerator.load_state(str(folder))
    return all(
        model.get_parameter(name) is parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    )


def test_groups_have_the_names_of_their_parameters(run: Run, tmp_path: Path) -> None:
    assert run(name_parameters, tmp_path / "state", 1, processes=1) == [True]
    assert run(name_parameters, tmp_path / "state", 2, processes=2) == [True, True]


def use_wrongly() -> None:
    accelerator = make_accelerator("", "1f1b", 2)
    model, _, loader = build(accelerator)
    batch = next(iter(loader))
    with pytest.raises(StateError, match="forward_backward"):
        model(batch["ids"])
    if accelerator.is_main_process:
        with pytest.raises(StateError, match="is on stage 1 of the pipeline"):
            model.norm(torch.zeros(1, 8))
    with pytest.raises(ConfigurationError, match="pass detached tensors"):
        accelerator.forward_backward(model, {**batch, "bias": torch.ones(2, requires_grad=True)}, mean_loss)
    accelerator.forward_backward(model, batch, mean_loss)
    own = [parameter for _, parameter in model.named_parameters()]
    with pytest.raises(StateError, match="of the stages of this rank only"):
        clip_grad_norm_(own, 0.5)
    for norm in (
        lambda: clip_grad_norm_(model.parameters(), 0.5),
        lambda: sum(p.grad.norm().item() ** 2 for p in model.parameters()),
        lambda: torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm(),
    ):
        with pytest.raises(StateError, match=r"norm of the gradients with accelerator\.clip_grad_norm_"):
            norm()
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    clip_grad_norm_(other.parameters(), 0.5)
    accelerator.free_memory()
    clip_grad_norm_(own, 0.5)


def test_uses_of_parts_of_a_model_are_refused(run: Run) -> None:
    run(use_wrongly, processes=2)


class NormalizedDescent(torch.optim.Optimizer):
    """Divides gradients by the norm of all of them."""

    def step(self) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
        for parameter in parameters:
            parameter.data -= 0.1 * parameter.grad / norm


def prepare_optimizer(kind: str) -> str:
    accelerator = make_accelerator("", "1f1b", 2)
    model = Net()
    kinds: dict[str, Any] = {"LBFGS": torch.optim.LBFGS, "norm": partial(NormalizedDescent, defaults={})}
    with pytest.raises(PreparationError) as raised:
        accelerator.prepare(model, kinds[kind](model.parameters()))
    return str(raised.value)


def test_optimizers_that_need_the_parameters_of_all_stages_are_refused(run: Run) -> None:
    for messages in run(call_for_each, prepare_optimizer, ["LBFGS", "norm"], processes=2):
        assert all("updates a parameter depending on the others" in message for message in messages)


def pairs_loss(logits: Tensor, batch: Any) -> Tensor:
    return logits.mean(0).square().sum()


def train_on_pairs() -> str:
    accelerator = make_accelerator("", "1f1b", 2)
    model, _, loader = build(accelerator)
    try:
        accelerator.forward_backward(model, next(iter(loader)), pairs_loss)
    except PreparationError as error:
        return str(error)
    except RuntimeError as error:  # the other rank has left
        return f"RuntimeError: {error}"
    return ""


def test_a_loss_over_pairs_of_samples_is_refused(run: Run) -> None:
    found = run(train_on_pairs, processes=2, timeout=60)
    assert "set microbatches=1" in found[1]


class Skipping(nn.Module):
    """A net whose last block gets the output of the first one past the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        hidden = self.blocks[2](self.blocks[1](first))
        last: Tensor = self.blocks[3](hidden + first)
        return last


class Reordered(nn.Module):
    """A net that registers its head before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Nested(Reordered):
    """A net with lists of blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        blocks = list(self.blocks)
        self.blocks = nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            for block in part:
                x = torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


class Common(Reordered):
    """A net whose blocks have a module in common."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), common) for _ in range(4))


class Recurrent(Reordered):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = x + block(x)[0]
        logits: Tensor = self.head(x[:, -1])
        return logits


class Chained(nn.Module):
    """A net whose code names its modules from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks, self.norm = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def features(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.blocks(self.enter(x)))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class Alternating(Reordered):
    """A net that goes through two lists of blocks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + norm(block(x))
        logits: Tensor = self.head(x)
        return logits


class Queried(Reordered):
    """A net that uses weights of its modules between the blocks, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.enter = nn.Embedding(3, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.queries.weight.mean(0).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.linear(x, self.enter.weight))
        return logits


class Scaled(Reordered):
    """A net with a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), 0.5)) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + block(x) * scale
        logits: Tensor = self.head(x)
        return logits


class Cache(nn.Module):
    """Creates a buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.length < x.shape[1]:
            self.length = x.shape[1]
            self.register_buffer("table", torch.arange(self.length) / self.length, persistent=False)
        return self.get_buffer("table")[: x.shape[1]]


class Caching(nn.Linear):
    def __init__(self, cache: nn.Module) -> None:
        super().__init__(8, 8)
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.cache(x))


class Cached(Reordered):
    """A net whose layers share one cache, use caches of their own, and get one."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, shared = Cache(), Cache()
        self.blocks = nn.ModuleList(Caching(shared if index % 2 else Cache()) for index in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.cache(x))


class Reversed(Reordered):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Permuted(Reordered):
    def forward(self, x: Tensor) -> Tensor:
        for index in (3 - number for number in range(4)):
            x = self.blocks[index](x)
        return x


class Unordered(Reordered):
    """A net whose stages call their blocks in another order than in the list."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (number ^ 1 for number in range(4)):
            x = torch.tanh(self.blocks[index](x))
        logits: Tensor = self.head(x)
        return logits


class Activated(Reordered):
    """A net with one activation in all places, which has a weight."""

    def __init__(self) -> None:
        super().__init__()
        activation = nn.PReLU()
        blocks = [layer for block in self.blocks for layer in (block, activation)]
        self.blocks = nn.ModuleList(blocks)


class Aliased(Reordered):
    """A net whose list has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.blocks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


KINDS = (Skipping, Reordered, Nested, Common, Recurrent, Chained, Alternating, Queried, Scaled, Cached)
KINDS += (Reversed, Unordered, Activated, Aliased)
ORDERS = {kind.__name__: kind for kind in KINDS}


def train_in_order(name: str, schedule: str) -> None:
    torch.manual_seed(0)
    model = ORDERS[name]()
    alone, batch = copy.deepcopy(model), (torch.randn(8, 8), torch.randn(8, 8))
    handler = PipelineConfig(schedule=schedule, microbatches=4)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    model = accelerator.prepare(model)
    expected = F.mse_loss(alone(batch[0]), batch[1])
    expected.backward()
    torch.testing.assert_close(accelerator.forward_backward(model, batch, F.mse_loss), expected.detach())
    own = dict(model.named_parameters(remove_duplicate=False))
    assert 0 < len(own) < len(dict(alone.named_parameters(remove_duplicate=False)))
    for parameter_name, parameter in alone.named_parameters(remove_duplicate=False):
        # Gradients of weights that stages have in common are added up in the step.
        is_common = name == "Common" or parameter_name.startswith(("queries", "enter", "scales"))
        if not is_common and parameter_name in own:
            torch.testing.assert_close(own[parameter_name].grad, parameter.grad, msg=parameter_name)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch[0]), alone.eval()(batch[0]))


def test_models_of_any_order_train_as_on_one_process(run: Run) -> None:
    cases = [(name, "1f1b") for name in ORDERS]
    cases += [(name, "interleaved1f1b") for name in ("Skipping", "Nested", "Alternating")]
    run(call_for_each, train_in_order, cases, processes=2, timeout=120)


def refuse(name: str, split: Any) -> str:
    model = {"one": nn.Sequential(nn.Linear(8, 8)), "skips": Skipping(), "permuted": Permuted()}[name]
    mesh = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(split=split, microbatches=2))
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    try:
        accelerator.forward_backward(accelerator.prepare(model), batch, F.mse_loss)
    except (PreparationError, ConfigurationError) as error:
        return str(error)
    return ""


def test_models_that_cannot_be_split_are_refused(run: Run) -> None:
    cases: list[tuple[str, Any]] = [("one", "auto"), ("permuted", "auto")]
    cases += [("skips", ["blocks.7"]), ("skips", ["blocks.1", "blocks.2"])]
    expected = (
        "Sequential cannot be split into 2 stages",
        "calls blocks.0 of stage 0 on stage 1",
        "Skipping has no such modules",
        "2 stages begin at 1 modules",
    )
    for texts in run(call_for_each, refuse, cases, processes=2):
        assert [text for part, text in zip(expected, texts, strict=True) if part not in text] == []


def use_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    inputs, targets = torch.ones(4, 2), torch.zeros(4, 1)
    loss = accelerator.forward_backward(model, (inputs, targets), F.mse_loss)
    assert not loss.requires_grad
    assert loss == F.mse_loss(model(inputs), targets)
    assert model.weight.grad is not None


def test_one_process_needs_no_pipeline(run: Run) -> None:
    run(use_one_process, processes=1)
