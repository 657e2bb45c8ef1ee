"""Training loops drawn from seeds, which train as plain torch does on one process with the joined batches.

A loop is a program, the text of a user's training script, which `programs.py` writes. It runs twice: with the
objects of the package on one to three ranks, and with those of `plain.py` on one process. What both log must
be equal, unless the package raises an error or logs a warning.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import AccelerateError, environ
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path
try:
    import plain
    import programs
    from programs import FAMILIES, Loop, draw, scheduler_of, write
finally:
    sys.path.pop(0)

TOLERANCE = 1e-7  # Adam divides rounding errors by small gradients
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: optim.Adam(parameters, 0.02),
    "adamw": lambda parameters: optim.AdamW(parameters, 0.02),
    "fused": lambda parameters: optim.AdamW(parameters, 0.02, fused=True),
    "lbfgs": lambda parameters: optim.LBFGS(parameters, 0.1, max_iter=3),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.3, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0),
}


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.body(inputs)))
        return outputs


def mean(values: Tensor, share: Tensor) -> Tensor:
    """The mean over the samples of a rank; in the joined batch, the mean of those of the ranks."""
    return (values * share).sum() / share.sum()


def total(values: Tensor, items: Tensor) -> Tensor:
    return (values * items).sum()


def make_samples(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    inputs, outputs = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    items = 1 + torch.arange(length) % 3
    return inputs, outputs[:, :1], items[:, None].double(), torch.ones(length, 1, dtype=torch.float64)


LOADERS = ("loader", "second_loader", "held_out")


def sizes_of(loop: Loop) -> list[tuple[int, int, bool]]:
    """Samples, size of a batch of a rank, and `drop_last` of each loader."""
    batches = [loop.batch, loop.batch, 2]
    lengths = [loop.samples, loop.second_samples, loop.held_out]
    if not loop.even:  # as many batches on each rank, of which the last is shorter
        for number, size in enumerate(batches):
            rounds = max(1, lengths[number] // (size * loop.world))
            lengths[number] = rounds * size * loop.world - lengths[number] % size
    return list(zip(lengths, batches, [loop.drop_last, False, False], strict=True))


def make_objects(loop: Loop) -> dict[str, Any]:
    """The models, optimizers and schedulers of torch."""
    torch.manual_seed(loop.seed)
    wide = loop.family in ("chain", "gan")
    objects: dict[str, Any] = {
        name: Net(3 if wide and name == "model" else 1).double() for name in loop.models
    }
    if loop.frozen in ("start", "thawed", "group"):
        objects["model"].body.requires_grad_(False)
    for name, target in FAMILIES[loop.family].items():
        model, _, part = ("model.head" if loop.frozen == "group" else target).partition(".")
        module = getattr(objects[model], part) if part else objects[model]
        objects[name] = OPTIMIZERS[loop.optimizer](module.parameters())
        if loop.scheduler:
            objects[scheduler_of(name)] = SCHEDULERS[loop.scheduler](objects[name])
    return objects


Event = tuple[str, list[float]]


def run_program(
    text: str, accelerator: Any, objects: dict[str, Any], reduction: str, folder: str
) -> list[Event]:
    """Run a program, and return what it logs."""
    events: list[Event] = []

    def log(loss: Tensor, *optimizers: Any) -> None:
        events.append(("loss", [accelerator.reduce(loss.detach().clone(), reduction).item()]))
        log_state(*optimizers)

    def log_state(*optimizers: Any) -> None:
        events.append(("updates", [float(optimizer.num_updates) for optimizer in optimizers]))
        rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
        events.append(("rates", rates))

    def log_weights(*objects: Any) -> None:
        log_state(*[each for each in objects if hasattr(each, "param_groups")])
        for model in objects:
            if isinstance(model, nn.Module):
                parameters = [parameter.detach() for parameter in model.parameters()]
                whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in parameters]
                events.append(("weights", torch.cat([each.flatten() for each in whole]).tolist()))

    def log_metric(values: Tensor) -> None:
        events.append(("metric", values.flatten().tolist()))

    functions = {
        "log": log,
        "log_weights": log_weights,
        "log_metric": log_metric,
        "mean": mean,
        "total": total,
    }
    names = {"torch": torch, "nullcontext": nullcontext, "folder": folder, "accelerator": accelerator}
    exec(compile(text, "<the loop>", "exec"), functions | names | objects)
    return events


def run_plain(loop: Loop) -> list[Event]:
    objects = make_objects(loop)
    is_constant = loop.accumulation == "constant"
    accelerator = plain.Plain(1 if is_constant else loop.steps, loop.ends_with_loader)
    for name, (length, batch, drop_last) in zip(LOADERS, sizes_of(loop), strict=True):
        samples = make_samples(length)
        options = {"split": loop.split, "even": loop.even, "drop_last": drop_last}
        world = loop.world
        if name == "held_out":  # each sample once
            options |= {"split": False, "even": False}
        elif is_constant:
            world, batch = 1, loop.steps * loop.batch
        joined = plain.join_batches(length, batch, world, **options)
        objects[name] = plain.Loader([plain.join(samples, parts) for parts in joined])
    accelerator.driver = objects["second_loader" if loop.loaders == "nested" else "loader"]
    accelerator.objects = [value for value in objects.values() if hasattr(value, "state_dict")]
    steps = 1 if loop.split or loop.policy == "per_update" or is_constant else loop.world
    steps_of_call = steps if loop.policy and loop.schedule != "epoch" else None
    for name in FAMILIES[loop.family]:
        optimizer = plain.Optimizer(objects[name], accelerator)
        accelerator.optimizers.append(optimizer)
        objects[name] = optimizer
        if loop.scheduler:
            other = scheduler_of(name)
            objects[other] = plain.Scheduler(objects[other], accelerator, steps_of_call)
    return run_program(write(loop), accelerator, objects, "mean", "")


def run_prepared(loop: Loop, folder: str) -> list[Event]:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    options: dict[str, Any] = {
        "num_steps": 1 if loop.is_manual else loop.steps,
        "sync_each_batch": loop.early,
    }
    options["sync_with_dataloader"] = loop.ends_with_loader
    if loop.accumulation == "constant":
        options = {"global_batch_size": loop.steps * loop.batch}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if loop.strategy == "fsdp" else None
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(**options),
        dataloader_config=DataLoaderConfiguration(split_batches=loop.split, even_batches=loop.even),
        step_scheduler_with_optimizer=loop.policy,  # type: ignore[arg-type]
        fsdp_plugin=plugin,
    )
    objects = make_objects(loop)
    for name, (length, batch, drop_last) in zip(LOADERS, sizes_of(loop), strict=True):
        size = batch * loop.world if loop.split else batch
        objects[name] = DataLoader(TensorDataset(*make_samples(length)), size, drop_last=drop_last)
    prepared = dict(zip(objects, accelerator.prepare(*objects.values()), strict=True))
    reduction = "sum" if loop.counts_items else "mean"
    try:
        return run_program(write(loop), accelerator, prepared, reduction, folder)
    finally:
        accelerator.free_memory()


@dataclass
class Result:
    """What one rank found out."""

    outcome: str  # "equal", "refused", "raised", "different", "invalid"
    text: str = ""
    warned: list[str] = field(default_factory=list)


class Warned(logging.Handler):
    """The warnings that the package has logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run_one(loop: Loop, folder: str) -> Result:
    warnings.simplefilter("ignore")
    try:
        expected = run_plain(loop)
    except Exception:
        return Result("invalid", traceback.format_exc())
    handler = Warned()
    logger = logging.getLogger("accelerate")
    logger.addHandler(handler)
    try:
        actual = run_prepared(loop, folder)
        PartialState().wait_for_everyone()
    except AccelerateError as error:
        return Result("refused", f"{type(error).__name__}: {error}", handler.texts)
    except Exception:
        return Result("raised", traceback.format_exc(), handler.texts)
    finally:
        logger.removeHandler(handler)
    if loop.strategy == "replicas":  # each group has losses and metrics of its own
        expected, actual = (
            [each for each in e if each[0] not in ("loss", "metric")] for e in (expected, actual)
        )
    difference = compare(expected, actual)
    return Result("different" if difference else "equal", difference, handler.texts)


def compare(expected: list[Event], actual: list[Event]) -> str:
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        name, values = one
        if name != other[0] or len(values) != len(other[1]):
            return f"event {number} of {len(expected)}: {one} became {other}"
        for value, found in zip(values, other[1], strict=True):
            if not abs(value - found) <= TOLERANCE * (abs(value) + 0.01):
                return f"event {number} of {len(expected)}, {name}: {values} became {other[1]}"
    return "" if len(expected) == len(actual) else f"{len(expected)} events became {len(actual)}"


@contextmanager
def open_groups(count: int) -> Iterator[list[dict[str, str]]]:
    """The variables of replica groups, as those of `accelerate launch --replicas`."""
    from torch.distributed import TCPStore
    from torchft.coordination import LighthouseServer

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=count,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=5_000,
    )
    variables = {
        "ACCELERATE_REPLICAS": str(count),
        "ACCELERATE_MIN_REPLICAS": str(count),
        "ACCELERATE_REPLICA_BATCH": "constant",
        "ACCELERATE_LIGHTHOUSE": f"http://localhost:{lighthouse.address().rpartition(':')[2]}",
        "ACCELERATE_RUN_STORE": f"localhost:{store.port}",
        "ACCELERATE_REPLICA_TIMEOUT": "60",
    }
    try:
        yield [{**variables, environ.REPLICA: str(number)} for number in range(count)]
    finally:
        lighthouse.shutdown()


def run_jobs(jobs: list[tuple[int, Loop]], root: str) -> None:
    """Run loops one after another on a rank, until one raises an error, and write their results to a file."""
    rank = os.environ.get(environ.REPLICA) or PartialState().process_index
    with Path(f"results_{rank}").open("wb") as file:
        for number, loop in jobs:
            result = run_one(loop, str(Path(root) / str(number)))
            pickle.dump(result, file)
            file.flush()
            if result.outcome in ("refused", "raised") and PartialState().num_processes > 1:
                return  # the ranks may have stopped at different places


def run(seeds: list[int], ask: Any) -> dict[int, str]:
    """Run trials, and return what each of them has found; empty text where nothing differs in silence."""
    groups: defaultdict[int, list[tuple[int, Loop]]] = defaultdict(list)
    results: dict[int, Any] = {}
    for loop in map(draw, seeds):
        if loop.strategy == "replicas":  # a run of its own
            results |= ask(run_jobs, [(loop.seed, loop)], loop.world, open_groups)
        else:
            groups[loop.world].append((loop.seed, loop))
    for world, jobs in groups.items():
        results |= ask(run_jobs, jobs, world)
    return {seed: each if isinstance(each, str) else judge(each) for seed, each in results.items()}


outcomes: Counter[str] = Counter()
"""What the trials of this process have found that is not a difference."""


def judge(results: list[Result]) -> str:
    """Return what is wrong with a trial, or count its outcome."""
    kinds = {result.outcome for result in results}
    texts = [f"rank {rank}: {each.outcome}: {each.text}" for rank, each in enumerate(results) if each.text]
    warned = [text for result in results for text in result.warned]
    message = results[0].text if kinds == {"refused"} else warned[0] if warned else ""
    short = re.sub(r"\d+", "N", message)[:120]
    if kinds == {"equal"} or kinds == {"refused"} or (kinds == {"different"} and warned):
        outcomes[f"{kinds.pop()} {short}".strip()] += 1
        return ""
    return "\n".join(texts)


def describe(seed: int) -> str:
    return programs.describe(draw(seed))
