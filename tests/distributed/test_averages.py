"""Averages of weights under each strategy equal the loop over whole weights, without collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.models import Experts, Mixture
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import CheckpointError, PreparationError, StateError, is_torch_version
from accelerate.utils import ExpertParallelConfig, GradientAccumulationPlugin, PipelineConfig
from accelerate.weights import read_safetensors

Run = Callable[..., list[Any]]
DECAY, EXACT = 0.7, 1e-7
WHOLE, SHARDS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
slow = pytest.mark.slow
needs_pipelines = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """With tied weights, a frozen parameter, and sizes that ranks cannot divide."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        is_flat = layout.startswith("fsdp1") and not layout.endswith("own parameters")
        self.enter = nn.Linear(6, 6, bias=False)
        kind = Mixture if layout == "ep" else Block
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(7), requires_grad=is_flat)
        self.leave = nn.Linear(6, 6, bias=False)
        if layout not in ("pp", "ep"):
            self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * self.scale[:6]


def accelerator_of(layout: str, kind: str = WHOLE) -> Accelerator:
    """Returns the accelerator of a layout, or that of one process if the run has one."""
    unchecked = GradientAccumulationPlugin(check_replicas=False)  # collectives of steps are counted
    options: dict[str, Any] = {}
    if layout.startswith("fsdp"):
        options = {"fsdp_version": int(layout[4]), "state_dict_type": kind}
        options["transformer_cls_names_to_wrap"] = ["Block"]
        options["auto_wrap_policy"] = "transformer_based_wrap"
        if layout == "fsdp1, own parameters":
            options["use_orig_params"] = True
        if layout == "fsdp1, whole":
            options["sharding_strategy"] = "NO_SHARD"
            warnings.filterwarnings("ignore", ".*NO_SHARD")
        if layout.endswith("kept gathered"):
            options["reshard_after_forward" if "2" in layout else "sharding_strategy"] = (
                False if "2" in layout else "SHARD_GRAD_OP"
            )
        if layout == "fsdp2, offloaded":
            options["cpu_offload"] = True
        plugin = FullyShardedDataParallelPlugin(**options)
        hybrid = (
            ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if layout == "fsdp2, hybrid" else None
        )
        return Accelerator(
            cpu=True, fsdp_plugin=plugin, parallelism_config=hybrid, gradient_accumulation_plugin=unchecked
        )
    if layout == "one":
        return Accelerator(cpu=True)
    sizes: dict[str, dict[str, Any]] = {
        "ddp": {},
        "sharded before": {},
        "tp": {"tp_size": 2},
        "ep": {
            "ep_size": 2,
            "ep_handler": ExpertParallelConfig(is_experts=lambda module: isinstance(module, Experts)),
        },
        "pp": {"pp_size": 2, "pp_handler": PipelineConfig(microbatches=2, schedule="1f1b")},
    }
    mesh = ParallelismConfig(**sizes[layout]) if sizes[layout] else None
    return Accelerator(cpu=True, parallelism_config=mesh, gradient_accumulation_plugin=unchecked)


def prepared(layout: str, kind: str = WHOLE, net: str = "", **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerator_of(layout, kind)
    model = Net(net or layout)
    if layout == "sharded before":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.05))
    return accelerator, model, optimizer, accelerator.average(model, DECAY, **options)


def step(accelerator: Any, model: Any, optimizer: Any, number: int) -> int:
    """Takes a step, and returns the number of collectives in that of the optimizer."""
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    accelerator.forward_backward(
        model, (rows, rows), lambda output, target: (output - target).square().mean()
    )
    with CommDebugMode() as counter:
        optimizer.step()
    optimizer.zero_grad()
    return int(counter.get_total_counts())


def whole_weights(accelerator: Any, model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in accelerator.get_state_dict(model).items()}


def exported(accelerator: Any, obj: Any, folder: str) -> dict[str, Tensor]:
    accelerator.save_model(obj, folder)
    accelerator.wait_for_everyone()
    return read_safetensors(Path(folder, "model.safetensors"))


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((value - right[name]).abs().max()) for name, value in left.items())


def average(layout: str, kind: str, **options: Any) -> Any:
    accelerator, model, optimizer, ema = prepared(layout, kind, **options)
    naive = whole_weights(accelerator, model)
    num_collectives = 0
    for number in range(3):
        num_collectives = step(accelerator, model, optimizer, number)  # pipelines compare steps 1 and 2
        for name, value in whole_weights(accelerator, model).items():
            naive[name].lerp_(value, 1 - DECAY)
    before = exported(accelerator, model, "model")
    with torch.no_grad():
        model(torch.ones(2, 6)) if layout != "pp" else None  # units that stay gathered after it
    with CommDebugMode() as counter, ema.applied():
        pass
    num_collectives += counter.get_total_counts()
    with ema.applied(), torch.no_grad():
        model(torch.ones(2, 6)) if layout != "pp" else None
    averaged, after = exported(accelerator, ema, "average"), exported(accelerator, model, "again")
    difference = largest_difference(averaged, naive) if naive else 0.0
    is_restored = all(torch.equal(before[name], after[name]) for name in before)
    trained = largest_difference(averaged, before)
    return difference, num_collectives, is_restored, set(averaged) == set(before), trained


LAYOUTS = [
    "fsdp2",
    "tp",
    pytest.param("ddp", marks=slow),
    pytest.param("fsdp1", marks=slow),
    pytest.param("fsdp1, own parameters", marks=slow),
    pytest.param("fsdp1, whole", marks=slow),
    pytest.param("fsdp1, kept gathered", marks=slow),
    pytest.param("fsdp2, kept gathered", marks=slow),
    pytest.param("fsdp2, offloaded", marks=slow),
    pytest.param("sharded before", marks=slow),
    pytest.param("ep", marks=slow),
    pytest.param("pp", marks=[slow, needs_pipelines]),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_are_those_of_a_loop_over_whole_weights(run: Run, layout: str) -> None:
    for difference, num_collectives, is_restored, has_names, trained in run(average, layout, WHOLE):
        assert difference <= EXACT
        assert num_collectives == 0
        assert is_restored
        assert has_names
        assert trained > 1e-3  # the average is not the weights


@slow
def test_averages_of_hybrid_shards(run: Run) -> None:
    for difference, num_collectives, is_restored, _, _ in run(average, "fsdp2, hybrid", WHOLE, processes=4):
        assert (difference <= EXACT, num_collectives, is_restored) == (True, 0, True)


def resume(layout: str, kind: str) -> Any:
    accelerator, model, optimizer, ema = prepared(layout, kind, every=2, start=2)
    for number in range(3):
        step(accelerator, model, optimizer, number)
    accelerator.save_state("checkpoint")
    saved = exported(accelerator, ema, "average")
    results = []
    for _ in range(2):
        for number in range(3, 6):
            step(accelerator, model, optimizer, number)
        results.append(exported(accelerator, ema, f"after_{len(results)}"))
        accelerator.load_state("checkpoint")
    loaded = exported(accelerator, ema, "loaded")
    names = sorted({path.name.split(".safe")[0] for path in Path("checkpoint").glob("averages*")})
    equal = [all(torch.equal(a[name], b[name]) for name in a) for a, b in (results, (saved, loaded))]
    return equal, names, str(Path("checkpoint").resolve()), saved


def load(layout: str, kind: str, net: str, folder: str) -> Any:
    accelerator, _, _, ema = prepared(layout, kind, net)
    accelerator.load_state(folder)
    return exported(accelerator, ema, "average")


@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        pytest.param("fsdp2, hybrid", SHARDS, [("one", 1), ("fsdp2", 2)], marks=slow),
        ("fsdp2", SHARDS, [("one", 1), ("fsdp2", 3)]),
        pytest.param("ddp", WHOLE, [("one", 1), ("fsdp2", 2)], marks=slow),
        pytest.param("fsdp2", WHOLE, [("one", 1), ("ddp", 2)], marks=slow),
        pytest.param("fsdp1", SHARDS, [("fsdp1", 3), ("fsdp2", 2)], marks=slow),
        pytest.param("fsdp1", WHOLE, [("fsdp1", 3)], marks=slow),
        pytest.param("fsdp1, own parameters", SHARDS, [("one", 1)], marks=slow),
        pytest.param("tp", WHOLE, [("one", 1)], marks=slow),
        pytest.param("ep", SHARDS, [("one", 1)], marks=slow),
        pytest.param("pp", SHARDS, [("one", 1)], marks=[slow, needs_pipelines]),
    ],
)
def test_averages_resume_bitwise_and_with_another_layout(
    run: Run, layout: str, kind: str, others: list[tuple[str, int]]
) -> None:
    results = run(resume, layout, kind, processes=4 if layout == "fsdp2, hybrid" else 2)
    for equal, names, _, _ in results:
        assert equal == [True, True]
        assert names == (["averages_0"] if kind == SHARDS else ["averages"])
    _, _, folder, saved = results[0]
    for other, processes in others:
        for loaded in run(load, other, kind, layout, folder, processes=processes):
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def refuse(kind: str) -> list[str]:
    accelerator, model, optimizer, ema = prepared("fsdp1", kind)
    texts = []
    with accelerator.unsharded(model):
        try:
            with ema.applied():
                pass
        except StateError as error:
            texts.append(str(error))
    ema.remove()
    accelerator.save_state("checkpoint")
    accelerator.average(model)
    step(accelerator, model, optimizer, 0)
    try:
        accelerator.load_state("checkpoint")
    except CheckpointError as error:
        texts.append(str(error))
    return texts


def fail_on_one_rank() -> str:
    accelerator = Accelerator(cpu=True)
    model = Net("ddp")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.process_index == 1:
        optimizer.param_groups[0]["params"].pop(1)  # the first is frozen
    with pytest.raises(PreparationError) as raised:
        accelerator.average(model)
    return str(raised.value)


@slow
def test_an_error_of_one_rank_is_raised_on_all(run: Run) -> None:
    assert all("No prepared optimizer steps enter.weight" in text for text in run(fail_on_one_rank))


@slow
def test_gathered_parameters_and_checkpoints_without_averages_are_refused(run: Run) -> None:
    for gathered, missing in run(refuse, SHARDS):
        assert "Enter applied() first" in gathered
        assert "call accelerator.average() after load_state()" in missing
