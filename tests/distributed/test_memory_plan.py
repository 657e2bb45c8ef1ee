"""`plan_memory` on several ranks: each strategy has its layout, and nothing is communicated."""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, torch_private
from accelerate.base import StateError, compare_versions
from accelerate.nested import iterate_tensors

WIDTH = 8


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def plan_of_two_ranks(sharded: bool) -> tuple[str, dict[str, int], str]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False) if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, batch = build(), torch.zeros(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    plan = accelerator.plan_memory(model, optimizer, batch, loss_of)
    model, optimizer = accelerator.prepare(model, optimizer)
    try:
        again = str(accelerator.plan_memory(model, optimizer, batch, loss_of).parts == plan.parts)
    except StateError as error:
        again = str(error)
    return plan.layout.name, plan.parts.as_dict(), again


def test_a_plan_has_the_layout_of_the_strategy(run: Any) -> None:
    size = sum(parameter.nbytes for parameter in build().parameters())
    for name, parts, again in run(plan_of_two_ranks, False, processes=2):
        assert (name, parts["parameters"], parts["communication"], again) == ("ddp", size, size, "True")
    for name, parts, again in run(plan_of_two_ranks, True, processes=2):
        assert (name, parts["parameters"]) == ("shard_grad_op", size // 2)
        assert "before `prepare`" in again


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def planned_and_measured(sharded: bool, frees: bool, steps: int) -> float:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=frees,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin if sharded else None, gradient_accumulation_steps=steps
    )
    model, batch = Blocks(), torch.zeros(64, 128)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    planned = accelerator.plan_memory(model, optimizer, batch, loss_of).peak
    model, optimizer = accelerator.prepare(model, optimizer)
    tracker = torch_private.MemTracker()
    tracker.track_external(model, batch)
    peaks = []
    for _ in range(4):  # threads of gloo may free buffers late, so one step may have a higher peak
        with tracker:  # which sets the peak to the current memory
            for _ in range(steps):
                tracker.reset_mod_stats()
                gc.collect()  # the hooks of the tracker leave cycles
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
        peaks.append(sum(parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values()))
    return planned / min(peaks[1:])


@pytest.mark.parametrize(
    ("sharded", "frees", "steps", "difference"),
    [
        (False, False, 1, 0.05),
        pytest.param(True, True, 1, 0.2, marks=pytest.mark.slow),
        pytest.param(True, False, 1, 0.2, marks=pytest.mark.slow),
        (True, True, 2, 0.2),
    ],
    ids=["ddp", "full_shard", "shard_grad_op", "full_shard, accumulation"],
)
def test_a_plan_is_near_the_peak_of_ranks_that_train(
    sharded: bool, frees: bool, steps: int, difference: float, run: Any
) -> None:
    for ratio in run(planned_and_measured, sharded, frees, steps, processes=2):
        assert ratio == pytest.approx(1, abs=difference)


SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
                         "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "num_experts_per_tok": 2, "max_position_embeddings": 64,
                         "use_cache": False}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 256, "head_dim": 32},
}


def choose_evenly(router: Any, args: Any, output: Any) -> Any:
    logits, scores, indices = output
    return logits, scores, torch.arange(indices.numel()).remainder(router.num_experts).view(indices.shape)


def local_bytes(tensors: Any) -> int:
    return sum(getattr(tensor, "to_local", lambda tensor=tensor: tensor)().nbytes for tensor in tensors)


def allocated_in_second_step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> int:
    """Returns the bytes at the peak of the second step, by the allocations that torch's profiler records.

    Each step is measured alone, because threads of gloo may free buffers later, which is not recorded.
    """

    def step() -> Any:
        output = model(**batch)
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        return output

    kept = list(iterate_tensors(step()))
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = local_bytes([*model.parameters(), *model.buffers(), *states, *kept])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return held + max(accumulate(sizes))


def experts_planned_and_measured(
    family: str, mesh: dict[str, int], sharded: bool
) -> tuple[str, float, float]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin if sharded else None, parallelism_config=ParallelismConfig(**mesh)
    )
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(choose_evenly)
    ids = torch.randint(0, 512, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    optimizer: Any = torch.optim.AdamW(model.parameters())
    plan = accelerator.plan_memory(model, optimizer, batch)
    model, optimizer = accelerator.prepare(model, optimizer)
    peak = allocated_in_second_step(accelerator, model, optimizer, batch)
    return plan.layout.name, plan.parts.parameters / local_bytes(model.parameters()), plan.peak / peak


@pytest.mark.skipif(
    compare_versions("transformers", "<", "5.23"),
    reason="models of this transformers have no plan of experts",
)
@pytest.mark.parametrize(
    ("family", "mesh", "sharded", "name", "difference"),
    [
        ("Mixtral", {"ep_size": 2}, True, "full_shard + ep 2", 0.25),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("Mixtral", {"ep_size": 2}, False, "ddp + ep 2", 0.1),
                ("Qwen3Moe", {"ep_size": 2}, False, "ddp + ep 2", 0.1),
                ("Qwen3Moe", {"ep_size": 2}, True, "full_shard + ep 2", 0.25),
                ("Mixtral", {"ep_size": 4}, False, "ddp + ep 4", 0.1),
                ("Mixtral", {"ep_size": 4}, True, "full_shard + ep 4", 0.25),
                ("Mixtral", {"ep_size": 2, "dp_replicate_size": 2}, False, "ddp + ep 2", 0.1),
                ("Mixtral", {"ep_size": 2, "dp_shard_size": 2}, True, "full_shard + ep 2", 0.25),
            ]
        ),
    ],
)
def test_a_plan_is_near_the_peak_of_ranks_that_share_experts(
    family: str, mesh: dict[str, int], sharded: bool, name: str, difference: float, run: Any
) -> None:
    num_ranks = mesh["ep_size"] * mesh.get("dp_replicate_size", 1) * mesh.get("dp_shard_size", 1)
    results = run(experts_planned_and_measured, family, mesh, sharded, processes=num_ranks)
    for layout, weights, peak in results:
        assert layout == name
        assert weights == pytest.approx(1, abs=0.001)
        assert peak == pytest.approx(1, abs=difference)
