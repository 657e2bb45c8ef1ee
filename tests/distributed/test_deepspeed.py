"""Training by real DeepSpeed engines in two processes on the CPU.

Needs the package deepspeed (0.19.8). The first run builds two extensions of DeepSpeed with g++, which takes
minutes.
"""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.base import CheckpointError, PreparationError
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DummyOptim, DummyScheduler, is_deepspeed_available, set_seed

pytestmark = pytest.mark.slow
Run = Callable[..., list[Any]]
ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}
STAGES = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu")]
KINDS = [(1, 0.0), (2, 0.5)]
"""Accumulation and clipping."""


@pytest.fixture(autouse=True)
def package() -> None:
    if not is_deepspeed_available():  # importing it here would leave a variable behind
        pytest.skip("deepspeed is not installed")


def net() -> nn.Module:
    set_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


def loader(samples: int, size: int = 4) -> torch.utils.data.DataLoader[Any]:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=size)


def start(plugin: Any, **arguments: Any) -> Accelerator:
    warnings.simplefilter("ignore")  # DeepSpeed calls what torch deprecates
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(deepspeed_plugin=plugin, step_scheduler_with_optimizer="per_update", **arguments)


def prepared(plugin: Any, steps: int = 1, size: int = 4, **arguments: Any) -> tuple[Accelerator, list[Any]]:
    accelerator = start(plugin, gradient_accumulation_steps=steps, **arguments)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return accelerator, list(accelerator.prepare(model, optimizer, loader(80 * steps, size), schedule))


def train(
    accelerator: Accelerator,
    objects: list[Any],
    limit: float = 0.0,
    after: Callable[[int], None] = lambda number: None,
    steps: int = 1000,
) -> tuple[list[float], list[float]]:
    model, optimizer, batches, schedule = objects
    losses, norms = [], []
    for number, (x, y) in enumerate(batches):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and limit:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), limit) or math.nan))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        after(number)
        if number + 1 == steps:
            break
    return losses, norms


def plugin_of(stage: int, place: str) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(
        zero_stage=stage,
        offload_optimizer_device=place,
        offload_param_device=place if stage == 3 else "none",
        zero3_save_16bit_model=True,
    )


def compare_with_replicas() -> list[tuple[Any, float, float]]:
    found: list[tuple[Any, float, float]] = []
    for steps, limit in KINDS:
        losses, norms = train(*prepared(None, steps), limit)
        for stage, place in STAGES:
            here, there = train(*prepared(plugin_of(stage, place), steps), limit)
            assert len(here) == 10 * steps
            found.append(
                (
                    (stage, place, steps, limit),
                    max(abs(a - b) for a, b in zip(losses, here, strict=True)),
                    max((abs(a - b) for a, b in zip(norms, there, strict=True)), default=0.0),
                )
            )
    return found


def test_losses_and_norms_are_those_of_replicas(run: Run) -> None:
    for results in run(compare_with_replicas, env=ENVIRONMENT, timeout=600):
        assert len(results) == len(STAGES) * len(KINDS)
        for kind, loss, norm in results:
            assert loss < 1e-4, kind
            assert norm < 1e-4, kind


def average_weights(stage: int, place: str, precision: str) -> tuple[float, bool, bool, bool]:
    """Averages while training, saves and resumes, and exports the average."""
    accelerator, objects = prepared(plugin_of(stage, place), mixed_precision=precision)
    model = objects[0]
    average = accelerator.average(model, decay=0.7)
    naive = [p.detach().float().clone() for p in model.module.parameters()]

    def follow(_: int) -> None:
        for mean, weight in zip(naive, model.module.parameters(), strict=True):
            mean.lerp_(weight.detach().float(), 1 - 0.7)

    train(accelerator, objects, after=follow, steps=4, limit=0.5)
    difference = max(
        float((own - mean).abs().max()) for own, mean in zip(average.tensors(), naive, strict=True)
    )
    weights = [p.detach().clone() for p in model.module.parameters()]
    with average.applied():
        applied = [p.detach().clone() for p in model.module.parameters()]
    is_restored = all(map(torch.equal, weights, model.module.parameters()))
    is_applied = all(
        torch.equal(p, mean.to(p.dtype)) for p, mean in zip(applied, average.tensors(), strict=True)
    )
    accelerator.save_state("checkpoint")
    saved = [mean.clone() for mean in average.tensors()]
    accelerator.save_model(average, "exported")
    accelerator.wait_for_everyone()
    exported = load_file("exported/model.safetensors")
    names = [name for name, _ in model.module.named_parameters()]
    is_applied &= all(torch.equal(exported[name], p) for name, p in zip(names, applied, strict=True))
    train(accelerator, objects, steps=2)
    accelerator.load_state("checkpoint")
    return difference, is_restored, is_applied, all(map(torch.equal, saved, average.tensors()))


@pytest.mark.parametrize(("stage", "place"), [each for each in STAGES if each[0] < 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_averages_are_those_of_a_loop(run: Run, stage: int, place: str, precision: str) -> None:
    for difference, *holds in run(average_weights, stage, place, precision, env=ENVIRONMENT, timeout=600):
        assert difference <= 1e-7
        assert all(holds)


def refuse_averages() -> str:
    accelerator, objects = prepared(plugin_of(3, "none"))
    with pytest.raises(PreparationError) as error:
        accelerator.average(objects[0])
    return str(error.value)


def test_averages_of_partitioned_weights_are_refused(run: Run) -> None:
    for text in run(refuse_averages, env=ENVIRONMENT, timeout=600):
        assert "Use stage 2, or FSDP" in text


def stream_weights() -> list[tuple[int, list[str], bool]]:
    found = []
    for stage in range(4):
        accelerator, objects = prepared(plugin_of(stage, "none"))
        train(accelerator, objects, steps=2)
        folder = Path(f"stage {stage}")
        accelerator.save_model(objects[0], folder)
        weights = {name: tensor.clone() for name, tensor in accelerator.stream_weights(objects[0])}
        saved = load_file(folder / "model.safetensors") if accelerator.is_main_process else {}
        accelerator.wait_for_everyone()
        same = all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
        found.append((stage, sorted(weights), same and weights.keys() == saved.keys()))
    return found


def test_streamed_weights_are_those_of_a_saved_model(run: Run) -> None:
    on_first, on_other = run(stream_weights, env=ENVIRONMENT, timeout=600)
    assert on_first == [(stage, sorted(net().state_dict()), True) for stage in range(4)]
    assert on_other == [(stage, [], True) for stage in range(4)]


def train_in_bfloat16() -> list[tuple[float, float, set[Any]]]:
    found = []
    for stage in range(4):
        accelerator, objects = prepared(plugin_of(stage, "none"), mixed_precision="bf16")
        losses, _ = train(accelerator, objects)
        state = accelerator.get_state_dict(objects[0])
        found.append((losses[0], losses[-1], {value.dtype for value in state.values()}))
    return found


def test_sixteen_bits(run: Run) -> None:
    first, second = run(train_in_bfloat16, env=ENVIRONMENT, timeout=300)
    assert all(dtypes == {torch.bfloat16} for _, _, dtypes in first)
    assert second[3][2] == set()  # shards come together on the main process
    assert [row[:2] for row in first] == [row[:2] for row in second]
    assert max(last for _, last, _ in first) - min(last for _, last, _ in first) < 0.5


def save_after_four(accelerator: Accelerator, target: Path, number: int) -> None:
    if number == 3:
        accelerator.save_state(target)


def save_and_resume(folder: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for stage in range(4):
        target = Path(folder, str(stage))
        accelerator, objects = prepared(plugin_of(stage, "none"))
        whole, _ = train(accelerator, objects, after=partial(save_after_four, accelerator, target))
        weights = accelerator.get_state_dict(objects[0])
        accelerator.save_model(objects[0], target.with_suffix(".model"))
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
        with accelerator.unsharded(objects[0]):
            for _ in range(accelerator.process_index + 1):
                inside = objects[0](x)
        outside = objects[0](x)
        again, (model, optimizer, batches, schedule) = prepared(plugin_of(stage, "none"))
        again.load_state(target)
        rest = again.skip_first_batches(batches, 4)
        resumed, _ = train(again, [model, optimizer, rest, schedule])
        if stage and accelerator.is_main_process:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            net().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(target)))
        found[stage] = (whole[4:], resumed, weights, inside.detach(), outside.detach(), optimizer.num_updates)
    return found


def test_a_run_resumes_and_its_weights_load_into_a_plain_model(run: Run, tmp_path: Path) -> None:
    first, second = run(save_and_resume, str(tmp_path), env=ENVIRONMENT, timeout=300)
    from safetensors.torch import load_file

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    for stage in range(4):
        for results in (first, second):
            rest, resumed, _, inside, outside, updates = results[stage]
            assert resumed == pytest.approx(rest, abs=1e-5)
            assert torch.allclose(inside, outside)
            assert updates == 10
        plain = net()
        plain.load_state_dict(first[stage][2])
        assert torch.allclose(plain(x), first[stage][4])
        plain.load_state_dict(load_file(tmp_path / f"{stage}.model" / "model.safetensors"))
        assert torch.allclose(plain(x), first[stage][4])
    assert set(second[3][2]) == set()


def save_as_two(folder: str) -> dict[int, list[float]]:
    found = {}
    for stage in (1, 2, 3):
        accelerator, objects = prepared(plugin_of(stage, "none"))
        after = partial(save_after_four, accelerator, Path(folder, str(stage)))
        found[stage] = train(accelerator, objects, after=after)[0][4:]
    return found


def refuse_and_convert(folder: str) -> None:
    for stage in (1, 2, 3):
        accelerator, _ = prepared(plugin_of(stage, "none"), size=8)
        with pytest.raises(CheckpointError, match="saved by 2 processes") as caught:
            accelerator.load_state(Path(folder, str(stage)))
        command = str(caught.value).partition("`")[2].partition("`")[0].split()
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        subprocess.run([sys.executable, *command[1:], *workers], check=True, timeout=120)


def resume_alone(folder: str) -> dict[int, list[float]]:
    found = {}
    for stage in (1, 2, 3):
        plugin = plugin_of(stage, "none")
        plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
        accelerator, (model, optimizer, batches, schedule) = prepared(plugin, size=8)
        accelerator.load_state(Path(folder, str(stage)))
        rest = list(batches)[4:]
        found[stage] = train(accelerator, [model, optimizer, rest, schedule])[0]
    return found


def test_a_universal_checkpoint_resumes_with_another_world_size(run: Run, tmp_path: Path) -> None:
    whole = run(save_as_two, str(tmp_path), env=ENVIRONMENT, timeout=300)[0]
    run(refuse_and_convert, str(tmp_path), processes=1, env=ENVIRONMENT, timeout=300)
    (alone,) = run(resume_alone, str(tmp_path), processes=1, env=ENVIRONMENT, timeout=300)
    for stage, losses in whole.items():
        assert alone[stage] == pytest.approx(losses, abs=1e-4), stage


def share_shards_on_a_machine() -> tuple[list[float], list[float], int]:
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "contiguous_gradients": True}
    config = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",  # DeepSpeed's own is 1
    }
    accelerator, objects = prepared(DeepSpeedPlugin(hf_ds_config=config))
    losses, _ = train(accelerator, objects)
    size = objects[0].config["zero_optimization"]["zero_hpz_partition_size"]
    return losses, train(*prepared(plugin_of(3, "none")))[0], size


def test_keys_of_zero_plus_plus_reach_the_engine(run: Run) -> None:
    for losses, plain, size in run(share_shards_on_a_machine, env=ENVIRONMENT, timeout=120):
        assert size == 2
        assert losses == pytest.approx(plain, abs=1e-4)


def configure_everything() -> tuple[Any, list[float], int]:
    config = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    accelerator = start(DeepSpeedPlugin(hf_ds_config=config))
    model = net()
    stand_in = DummyOptim(model.parameters(), lr=1e-2)
    schedule = DummyScheduler(stand_in, total_num_steps=10, warmup_num_steps=2)
    objects = list(accelerator.prepare(model, stand_in, loader(80), schedule))
    rates: list[float] = []
    train(accelerator, objects, after=lambda _: rates.extend(objects[3].get_last_lr()))
    return accelerator.deepspeed_config, rates, objects[1].num_updates


def test_deepspeeds_own_optimizer_and_scheduler(run: Run) -> None:
    config, rates, updates = run(configure_everything, env=ENVIRONMENT, timeout=120)[0]
    assert config["train_batch_size"] == 8
    assert config["optimizer"]["params"]["lr"] == 1e-2
    assert config["scheduler"]["params"]["total_num_steps"] == 10
    assert "reduce_bucket_size" not in config["zero_optimization"]
    assert updates == 10
    assert max(rates) == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1.25e-3)


def train_two() -> tuple[list[float], list[float], list[int]]:
    accelerator = start({"a": DeepSpeedPlugin(zero_stage=2), "b": DeepSpeedPlugin(zero_stage=3)})
    one, two = net(), net()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    first, optimizer, batches = accelerator.prepare(one, optimizer, loader(80))
    accelerator.state.select_deepspeed_plugin("b")
    second, other = accelerator.prepare(two, torch.optim.AdamW(two.parameters(), lr=1e-2))
    losses: tuple[list[float], list[float]] = ([], [])
    for x, y in batches:
        mine = [nn.functional.mse_loss(model(x), y) for model in (first, second)]
        for loss, kept in zip(mine, losses, strict=True):
            accelerator.backward(loss)
            kept.append(loss.item())
        optimizer.step()
        other.step()
    return *losses, [first.zero_optimization_stage(), second.zero_optimization_stage()]


def test_two_models_train_with_two_plugins(run: Run) -> None:
    for one, two, stages in run(train_two, env=ENVIRONMENT, timeout=120):
        assert stages == [2, 3]
        assert one == pytest.approx(two, abs=1e-4)
        assert one[-1] != one[0]


def build_in_shards() -> tuple[list[int], list[float], list[float]]:
    accelerator = start(plugin_of(3, "none"))
    with accelerator.deepspeed_plugin.zero3_init_context_manager(enable=True):
        model = net()
    sizes = [p.numel() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    objects = list(accelerator.prepare(model, optimizer, loader(80), schedule))
    losses, _ = train(accelerator, objects)
    whole, _ = train(*prepared(plugin_of(3, "none")))
    return sizes, losses, whole


def test_models_are_built_in_shards(run: Run) -> None:
    for sizes, losses, whole in run(build_in_shards, env=ENVIRONMENT, timeout=120):
        assert sizes == [0, 0, 0, 0]
        assert losses == pytest.approx(whole, abs=1e-4)


def train_alone() -> tuple[list[float], list[float]]:
    plain, _ = train(*prepared(None))
    return plain, train(*prepared(plugin_of(2, "cpu")))[0]


def test_one_process_needs_no_launcher(run: Run) -> None:
    without = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    ((plain, losses),) = run(train_alone, processes=1, env={**ENVIRONMENT, **without}, timeout=120)
    assert len(losses) == 20
    assert losses == pytest.approx(plain, abs=1e-4)


class Experts(nn.Module):
    """Uses one of two layers, another one on each process."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert: torch.Tensor = self.each[torch.distributed.get_rank() % 2](x)
        return expert


def train_experts() -> tuple[list[float], bool]:
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Experts")
    accelerator = start(plugin)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    objects = list(accelerator.prepare(model, optimizer, loader(80), schedule))
    from deepspeed.utils import z3_leaf_module

    return train(accelerator, objects)[0], z3_leaf_module(model[1])


def test_layers_of_experts_are_fetched_whole(run: Run) -> None:
    for losses, is_leaf in run(train_experts, env=ENVIRONMENT, timeout=120):
        assert is_leaf
        assert len(losses) == 10
        assert all(map(math.isfinite, losses))
