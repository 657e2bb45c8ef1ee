"""Layouts of small random models, which train as plain torch does on one process, or are refused.

A trial assembles a model, trains it with pipeline or context parallelism or with recomputation, and compares
the losses, the outputs in evaluation and the weights with those of the same model on one process.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from accelerate import Accelerator, ParallelismConfig
from accelerate.base import AccelerateError
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ActivationCheckpointing, FullyShardedDataParallelPlugin, PipelineConfig

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path
try:
    from assembled import Net, Recipe, draw as draw_recipe, loss_of, make_batches
finally:
    sys.path.pop(0)

TOLERANCE, LENGTH = 1e-6, 8
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble")
LAYOUTS = ("pipeline", "pipeline", "pipeline", "pipeline and replicas", "pipeline and shards")
LAYOUTS += ("recomputation", "recomputation and shards", "context")
Values = list[tuple[str, list[float]]]  # name and numbers of what a run computes


@dataclass(frozen=True)
class Trial:
    recipe: Recipe
    layout: str
    world: int
    samples: int
    microbatches: int
    schedule: str
    steps: int = 3
    is_norm_clipped: bool = False
    every: int = 1
    save_operators: Any = None

    @property
    def groups(self) -> int:
        """Number of ranks with different batches."""
        if self.layout in ("pipeline", "context"):
            return 1
        return self.world // 2 if self.layout.startswith("pipeline") else self.world


def draw(seed: int) -> Trial:
    random = Random(seed)
    recipe, layout = draw_recipe(random, seed), random.choice(LAYOUTS)
    schedule = random.choice(SCHEDULES) if random.random() < 0.3 else "1f1b"
    if layout == "context" and recipe.loss not in ("classes", "regression"):
        recipe = replace(recipe, loss="mean")  # each rank has equally many tokens
    if layout == "context" and recipe.order == "odd tokens":
        recipe = replace(recipe, order="forward")  # ranks would call attention in different layers
    return Trial(
        recipe,
        layout,
        world=4 if layout.startswith("pipeline and") else 2,
        samples=random.choice([4, 4, 4, 6, 8]),
        microbatches=random.choice([1, 2, 2, 4]),
        schedule=schedule,
        is_norm_clipped=random.random() < 0.3,
        every=random.choice([1, 1, 2]),
        save_operators=random.choice([None, "matmul"]),
    )


def describe(seed: int) -> str:
    return str(draw(seed))


def build(trial: Trial) -> tuple[Net, optim.Optimizer, Any]:
    torch.manual_seed(trial.recipe.seed)
    net = Net(trial.recipe).double()
    weights = net.class_weights.clone()

    def loss_fn(outputs: Any, batch: Any) -> Tensor:
        return loss_of(trial.recipe, outputs, batch["labels"], batch["mask"], weights)

    return net, optim.SGD(net.parameters(), 0.1, momentum=0.9), None if trial.recipe.by_model else loss_fn


def samples_of(trial: Trial) -> list[dict[str, Tensor]]:
    """Returns the samples of all steps and of an evaluation."""
    batches = make_batches(trial.recipe, (trial.steps + 1) * trial.groups, trial.samples, LENGTH)
    return [
        {name: value[i] for name, value in batch.items()} for batch in batches for i in range(trial.samples)
    ]


def loaders_of(trial: Trial) -> tuple[DataLoader[Any], DataLoader[Any]]:
    samples = samples_of(trial)
    end = trial.steps * trial.groups * trial.samples
    return DataLoader(samples[:end], trial.samples), DataLoader(samples[end:], trial.samples)


def loss_in(net: nn.Module, batch: dict[str, Tensor], loss_fn: Any) -> Tensor:
    loss: Tensor = net(**batch)["loss"] if loss_fn is None else loss_fn(net(batch["tokens"]), batch)
    return loss


def numbers(tensor: Tensor) -> list[float]:
    return tensor.detach().double().flatten().tolist()  # type: ignore[no-any-return]


def run_plain(trial: Trial) -> Values:
    net, optimizer, loss_fn = build(trial)
    loader, held_out = loaders_of(trial)
    batches, found = list(loader), Values()
    for start in range(0, len(batches), trial.groups):
        losses = [loss_in(net, batch, loss_fn) for batch in batches[start : start + trial.groups]]
        loss = torch.stack(losses).mean()
        loss.backward()
        if trial.is_norm_clipped:
            found.append(("norm", numbers(nn.utils.clip_grad_norm_(net.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        found.append(("loss", numbers(loss)))
    net.eval()
    with torch.no_grad():
        found += [("outputs", numbers(torch.cat([net(batch["tokens"]) for batch in held_out])))]
    return [*found, *((name, numbers(value)) for name, value in net.named_parameters())]


def accelerator_of(trial: Trial) -> Accelerator:
    options: dict[str, Any] = {}
    if trial.layout.startswith("pipeline"):
        handler = PipelineConfig(schedule=trial.schedule, microbatches=trial.microbatches)
        sizes = {"pipeline and replicas": "dp_replicate_size", "pipeline and shards": "dp_shard_size"}
        other: Any = {sizes[trial.layout]: 2} if trial.layout in sizes else {}
        options["parallelism_config"] = ParallelismConfig(pp_size=2, pp_handler=handler, **other)
    elif trial.layout == "context":
        options["parallelism_config"] = ParallelismConfig(cp_size=trial.world)
    else:
        blocks = ActivationCheckpointing(every=trial.every, save_operators=trial.save_operators)
        options["kwargs_handlers"] = [blocks]
    if trial.layout.endswith("shards"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, **options)


@contextmanager
def sharded(trial: Trial, accelerator: Accelerator, batch: dict[str, Tensor]) -> Iterator[None]:
    if trial.layout != "context":
        yield
        return
    buffers = [value for value in batch.values() if value.ndim > 1]
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        yield


def train(
    trial: Trial, accelerator: Accelerator, model: Any, batch: dict[str, Tensor], loss_fn: Any
) -> Tensor:
    if trial.layout.startswith("pipeline"):
        return accelerator.forward_backward(model, batch, loss_fn)
    with sharded(trial, accelerator, batch):
        loss = loss_in(model, batch, loss_fn)
        accelerator.backward(loss)
    return loss


def run_layout(trial: Trial) -> Values:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = accelerator_of(trial)
    try:
        net, optimizer, loss_fn = build(trial)
        model, optimizer, loader, held_out = accelerator.prepare(net, optimizer, *loaders_of(trial))
        found = Values()
        for batch in loader:
            loss = train(trial, accelerator, model, batch, loss_fn)
            if trial.is_norm_clipped:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                found.append(("norm", numbers(torch.as_tensor(norm))))
            optimizer.step()
            optimizer.zero_grad()
            found.append(("loss", numbers(accelerator.reduce(loss.detach(), "mean"))))
        model.eval()
        outputs = []
        for batch in held_out:
            with torch.no_grad(), sharded(trial, accelerator, batch):
                output = model(batch["tokens"])
            outputs.append(accelerator.gather_for_metrics(output))
        found.append(("outputs", numbers(torch.cat(outputs))))
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            found += [(name, numbers(weights[name])) for name, _ in build(trial)[0].named_parameters()]
        return found
    finally:
        accelerator.free_memory()


@dataclass
class Result:
    """What one rank found out: "equal", "refused", "raised", "different" or "invalid"."""

    outcome: str
    text: str = ""


def run_one(trial: Trial) -> Result:
    warnings.simplefilter("ignore")
    try:
        expected = run_plain(trial)
    except Exception:
        return Result("invalid", traceback.format_exc())
    try:
        actual = run_layout(trial)
        PartialState().wait_for_everyone()
    except AccelerateError as error:
        return Result("refused", f"{type(error).__name__}: {error}")
    except Exception:
        return Result("raised", traceback.format_exc())
    difference = compare(expected, actual)
    return Result("different" if difference else "equal", difference)


def compare(expected: Values, actual: Values) -> str:
    for (name, values), (other, found) in zip(expected, actual, strict=False):
        if name != other or len(values) != len(found):
            return f"{name} with {len(values)} values became {other} with {len(found)}"
        scale = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        for value, each in zip(values, found, strict=True):
            if not (math.isnan(value) and math.isnan(each)) and not abs(value - each) <= TOLERANCE * (
                scale + 1e-3
            ):
                return f"{name}: {values[:6]} became {found[:6]}"
    return ""


def run_jobs(jobs: list[tuple[int, Trial]], root: str) -> None:
    """Run trials on a rank, until one raises an error, and write their results to a file."""
    with Path(f"results_{PartialState().process_index}").open("wb") as file:
        for _, trial in jobs:
            result = run_one(trial)
            pickle.dump(result, file)
            file.flush()
            if result.outcome in ("refused", "raised"):
                return  # the ranks may have stopped at different places


def run(seeds: list[int], ask: Any) -> dict[int, str]:
    """Run trials, and return what each of them has found; empty text where nothing differs in silence."""
    worlds: defaultdict[int, list[tuple[int, Trial]]] = defaultdict(list)
    for seed in seeds:
        worlds[draw(seed).world].append((seed, draw(seed)))
    results: dict[int, Any] = {}
    for world, jobs in worlds.items():
        results |= ask(run_jobs, jobs, world)
    return {seed: each if isinstance(each, str) else judge(each) for seed, each in results.items()}


outcomes: Counter[str] = Counter()
"""What the trials of this process have found that is not a difference."""


def judge(results: list[Result]) -> str:
    """Return what is wrong with a trial, or count its outcome."""
    kinds = {result.outcome for result in results}
    if kinds == {"raised"} and all("modified by an inplace operation" in each.text for each in results):
        kinds = {"refused"}  # by torch, as without this package
    if "refused" in kinds:  # the others may have waited for a rank that has left
        results = [each for each in results if "Connection closed by peer" not in each.text]
        kinds = {result.outcome for result in results}
    if kinds in ({"equal"}, {"refused"}):
        outcomes[f"{kinds.pop()} {re.sub(r'[0-9]+', 'N', results[0].text)[:130]}".strip()] += 1
        return ""
    texts = [f"rank {rank}: {each.outcome}: {each.text}" for rank, each in enumerate(results) if each.text]
    return "\n".join(texts)
