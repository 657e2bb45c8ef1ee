"""`stream_weights` yields the weights that `save_model` writes, under each way to shard them."""

from __future__ import annotations

import copy
import ctypes
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, is_torch_version
from accelerate.checkpointing import find_shards
from accelerate.utils import ExpertParallelConfig, PipelineConfig

Run = Callable[..., list[Any]]
WIDTH, WORDS = 8, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 2), nn.Linear(WIDTH + 2, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Language model with a tied head and a buffer."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(4, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("scale", torch.rand(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.weight)):
            rows, choices = torch.where(chosen == expert)
            mixed = tokens[rows] @ self.weight[expert] * weights[rows, choices, None]
            output = output.index_add(0, rows, mixed)
        return output


class NetOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        return self.experts(x, chosen, weights)  # type: ignore[no-any-return]


def _is_block(module: nn.Module, recurse: bool = False, **_: Any) -> bool:
    return recurse or isinstance(module, Block)


ONE = {"fsdp_version": 1, "cpu_ram_efficient_loading": False}
TWO = {"fsdp_version": 2, "cpu_ram_efficient_loading": False}
LAYOUTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, int]] = {
    "one process": (None, None, 1),
    "ddp": (None, None, 2),
    "fsdp2": (TWO, None, 2),
    "fsdp2 offload": ({**TWO, "cpu_offload": True}, None, 2),
    "fsdp1": ({**ONE, "use_orig_params": True}, None, 2),
    "fsdp1 flat": ({**ONE, "use_orig_params": False}, None, 2),
    "fsdp1 none": ({**ONE, "sharding_strategy": "NO_SHARD"}, None, 2),
    "fsdp1 hybrid": (
        {**ONE, "sharding_strategy": "HYBRID_SHARD"},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        4,
    ),
    "hsdp": (TWO, {"dp_replicate_size": 2, "dp_shard_size": 2}, 4),
    "fsdp1 on three": (ONE, None, 3),
    "tp": (None, {"tp_size": 2}, 2),
    "fsdp2 + tp": (TWO, {"dp_shard_size": 2, "tp_size": 2}, 4),
    "ep": (None, {"ep_size": 2, "dp_shard_size": 1}, 2),
    "pipeline": (None, {"pp_size": 2}, 2),
    "pipeline + fsdp2": (TWO, {"pp_size": 2, "dp_shard_size": 2}, 4),
}
"""Name -> fields of the plugin, sizes of the mesh, number of processes."""
CORE = ("one process", "ddp", "fsdp2", "fsdp1")


def prepare(layout: str, model: nn.Module | None = None) -> tuple[Accelerator, Any]:
    warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
    plugin, mesh, _ = LAYOUTS[layout]
    mesh = dict(mesh or {})
    if "ep_size" in mesh:
        mesh["ep_handler"] = ExpertParallelConfig(is_experts=lambda module: isinstance(module, Experts))
    if "pp_size" in mesh:
        mesh["pp_handler"] = PipelineConfig(schedule="gpipe", microbatches=2)
    policy = partial(_is_block)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin and FullyShardedDataParallelPlugin(auto_wrap_policy=policy, **plugin),
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
    )
    torch.manual_seed(0)
    model = model or (NetOfExperts() if layout == "ep" else Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if "pp_size" not in mesh:
        inputs = torch.randn(4, WIDTH) if layout == "ep" else torch.arange(8).view(2, 4)
        accelerator.backward(prepared(inputs).square().sum())
        optimizer.step()
    return accelerator, prepared


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in find_shards(folder) for name, tensor in load_file(path).items()}


def copy_of(accelerator: Accelerator, model: Any, **options: Any) -> dict[str, Tensor]:
    stream = accelerator.stream_weights(model, **options)
    return {name: tensor.clone() for name, tensor in stream}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that only one of the two has, or that differ."""
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(one[name], other[name])
    ]


def compare(layout: str) -> dict[str, Any]:
    accelerator, model = prepare(layout)
    accelerator.save_model(model, "saved")
    on_first = copy_of(accelerator, model, bucket_size=1200)
    on_all = copy_of(accelerator, model, bucket_size="1MB", all_ranks=True)
    for _ in islice(accelerator.stream_weights(model, bucket_size=1200), 2):
        pass  # rank 0 leaves the loop early
    if accelerator.process_index == 0:
        next(accelerator.stream_weights(model, all_ranks=True, bucket_size=1200))
    else:
        copy_of(accelerator, model, all_ranks=True, bucket_size=1200)
    accelerator.wait_for_everyone()
    with pytest.raises(ConfigurationError) as refused:
        accelerator.stream_weights(model, bucket_size=8)
    saved = read(Path("saved"))
    return {
        "order": list(on_all),
        "on first": sorted(on_first),
        "differ": differences(on_all, saved) + (differences(on_first, saved) if on_first else []),
        "error": str(refused.value),
    }


@pytest.mark.parametrize(
    "layout", [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_the_weights_are_those_of_a_saved_model(run: Run, layout: str) -> None:
    if "pipeline" in layout and is_torch_version("<", "2.13"):
        pytest.skip("pipelines need torch 2.13")
    results = run(compare, layout, processes=LAYOUTS[layout][2])
    model = NetOfExperts() if layout == "ep" else Net()
    names = [name for name in model.state_dict() if name != "head.weight"]
    for rank, result in enumerate(results):
        assert result["order"] == names
        assert result["on first"] == ([] if rank else sorted(names))
        assert result["differ"] == []
        assert "bucket_size=8: smaller than " in result["error"]


# Adapters


def add_adapters(model: nn.Module) -> Any:
    """Returns a model of peft in which adapters, biases and a module of its own differ from the base."""
    import peft

    config = peft.LoraConfig(
        r=2,
        target_modules=["up", "tokens"],
        modules_to_save=["norm"],
        rank_pattern={"up": 3},
        lora_bias=False,
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.requires_grad_()  # FSDP 1 has either trained or frozen parameters in a unit
    return adapted


def merge(layout: str) -> tuple[list[str], float, list[str]]:
    """Returns names, the largest difference to peft, and the differences of adapters to a saved model."""
    torch.manual_seed(0)
    model = Net()
    model.head = nn.Linear(WIDTH, WORDS)  # peft warns about a tied one
    adapted = add_adapters(model)
    reference = copy.deepcopy(adapted).merge_and_unload().state_dict()
    plugin, mesh, _ = LAYOUTS[layout]
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin and FullyShardedDataParallelPlugin(auto_wrap_policy=partial(_is_block), **plugin),
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
    )
    prepared = accelerator.prepare(adapted)
    merged = copy_of(accelerator, prepared, bucket_size=1200, all_ranks=True, merge_adapters=True)
    accelerator.save_model(prepared, "saved")
    accelerator.wait_for_everyone()
    unmerged = copy_of(accelerator, prepared, all_ranks=True)
    assert list(merged) == list(reference)
    error = max(float((merged[name] - tensor).abs().max()) for name, tensor in reference.items())
    return list(merged), error, differences(unmerged, read(Path("saved")))


@pytest.mark.slow  # tests/unit/accelerator/test_weight_stream.py merges on one process
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp1", "fsdp1 flat", "hsdp"])
def test_merged_adapters_are_those_of_peft(run: Run, layout: str) -> None:
    pytest.importorskip("peft")
    for names, error, differ in run(merge, layout, processes=LAYOUTS[layout][2]):
        assert names == list(Net().state_dict())[:-1] + ["head.weight", "head.bias"]
        assert error < 1e-5
        assert differ == []


# Memory

LAYERS, SIDE, BUCKET_IN_LAYERS = 64, 1024, 4
SLACK = 4.5
"""Layers in memory beside the bucket, some of them in collectives that gloo has not released yet."""


def memory(field: str) -> int:
    """Returns a field of /proc/self/status in bytes: VmRSS, or VmHWM, its peak."""
    (size,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


def measure(all_ranks: bool) -> float:
    """Returns the peak of memory that a stream takes, in sizes of a layer."""
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: freed memory goes back to the system at once
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1000,
    )
    accelerator, layer = Accelerator(fsdp_plugin=plugin), 4 * SIDE**2
    model = accelerator.prepare(nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)]))
    options: dict[str, Any] = {"bucket_size": BUCKET_IN_LAYERS * layer, "all_ranks": all_ranks}
    next(accelerator.stream_weights(model, **options), None)  # torch loads modules
    accelerator.wait_for_everyone()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the current value
    before = memory("VmRSS")
    for _ in accelerator.stream_weights(model, **options):
        pass
    return (memory("VmHWM") - before) / layer


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stream_takes_the_memory_of_one_bucket_and_a_tensor(run: Run) -> None:
    on_first, on_other = run(measure, False)
    assert on_first < BUCKET_IN_LAYERS + SLACK < LAYERS / 4
    assert on_other < SLACK
    assert max(run(measure, True)) < BUCKET_IN_LAYERS + SLACK
