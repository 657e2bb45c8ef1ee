"""Training loops drawn from seeds, which train as plain torch does on one process with the joined batches.

A loop is a program, the text of a user's training script. It runs twice: with the objects of this package, on one
to three ranks, and with those of `plain.py`. What both log must be equal, unless the package raises an error or
logs a warning.
"""

from __future__ import annotations

import logging
import pickle
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import AccelerateError
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path
try:
    import plain
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
        [
            lr_scheduler.LinearLR(optimizer, 0.3, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, 0.95),
        ]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0),
}
FAMILIES = {  # the models and optimizers of each kind of loop; an optimizer may have a part of a model
    "one": {"optimizer": "model"},
    "retained": {"optimizer": "model"},
    "two losses": {"optimizer": "model"},
    "parts": {"optimizer": "model.body", "second_optimizer": "model.head"},
    "parts apart": {"optimizer": "model.body", "second_optimizer": "model.head"},
    "pair": {"optimizer": "model", "second_optimizer": "other"},
    "chain": {"optimizer": "model", "second_optimizer": "other"},
    "gan": {"optimizer": "other", "second_optimizer": "model"},  # the discriminator first
}


@dataclass(frozen=True)
class Loop:
    """What is drawn; the defaults are the simplest loop."""

    seed: int
    world: int = 2
    strategy: str = "ddp"
    family: str = "one"
    optimizer: str = "sgd"
    phased: bool = False  # all forward passes, all backward passes, all steps
    every: int = 1  # batches for each step of the second optimizer
    detached: bool = True  # the fakes of a GAN in the loss of the discriminator
    zero: str = "first"  # "before", "first", "forward", "step", "end"
    zero_how: str = "optimizer"  # "model", "zeros"
    clip: str = ""  # "norm", "value"
    guard_clip: bool = False
    guard_step: bool = False  # also guards `zero_grad` and the scheduler after the step
    closure: bool = False
    scheduler: str = ""
    schedule: str = "step"  # "before", "batch", "epoch"
    policy: bool | str = True
    accumulation: str = "none"  # "accumulate", "items", "windows", "window items", "constant", "manual", "no_sync"
    steps: int = 1
    change: tuple[int, int, int] | None = None  # epoch, batch, and the number of steps from there on
    apart: bool = False  # an `accumulate` for each model
    early: bool = False  # sync_each_batch
    ends_with_loader: bool = True
    outside: bool = False  # the steps of `windows` are behind the loop over a window
    loaders: str = "one"  # "zip", "cycled", "nested"
    samples: int = 24
    second_samples: int = 12
    batch: int = 2
    split: bool = False
    even: bool = True
    drop_last: bool = False
    evaluation: str = ""  # "epoch", "batch", "kept"
    held_out: int = 7
    stop: str = ""  # "break", "continue"
    stop_at: int = 2
    frozen: str = ""  # "start", "later", "thawed", "group"
    checkpoint: bool = False
    epochs: int = 3

    @property
    def models(self) -> list[str]:
        return sorted({name.split(".")[0] for name in FAMILIES[self.family].values()})

    @property
    def counts_items(self) -> bool:
        return self.accumulation in ("items", "window items")

    @property
    def is_accumulated(self) -> bool:
        return self.accumulation in ("accumulate", "items")

    @property
    def is_manual(self) -> bool:
        return self.accumulation in ("manual", "no_sync")

    @property
    def in_windows(self) -> bool:
        return self.accumulation in ("windows", "window items")


def draw(seed: int) -> Loop:
    choose = random.Random(seed)
    pick = choose.choice

    def sometimes(share: float) -> bool:
        return choose.random() < share

    accumulation = pick(
        ["none", "accumulate", "accumulate", "accumulate", "items", "windows", "window items", "constant"]
        + ["manual", "no_sync"]
    )
    loop = Loop(
        seed=seed,
        world=pick([1, 2, 2, 2, 3]),
        family=pick(["one", "one", "one", *FAMILIES]),
        optimizer=pick(["sgd", "momentum", "adam", "adamw", "fused"]),
        phased=sometimes(0.3),
        every=pick([1, 1, 1, 2]),
        detached=sometimes(0.7),
        zero=pick(["before", "first", "forward", "step", "step", "end"]),
        zero_how=pick(["optimizer", "optimizer", "optimizer", "model", "zeros"]),
        clip=pick(["", "", "norm", "value"]),
        guard_clip=sometimes(0.5),
        guard_step=sometimes(0.25),
        closure=sometimes(0.1),
        scheduler=pick(["", "", *SCHEDULERS]),
        schedule=pick(["step", "step", "before", "batch", "epoch"]),
        policy=pick([True, True, True, "per_update", False]),
        accumulation=accumulation,
        steps=1 if accumulation == "none" else pick([1, 2, 2, 3]),
        change=(choose.randrange(3), choose.randrange(4), pick([1, 2, 3])) if sometimes(0.15) else None,
        apart=sometimes(0.4),
        early=sometimes(0.15),
        ends_with_loader=sometimes(0.8),
        outside=sometimes(0.5),
        loaders=pick(["one", "one", "one", "one", "zip", "cycled", "nested"]),
        samples=choose.randrange(12, 40),
        second_samples=choose.randrange(7, 30),
        batch=pick([2, 3]),
        split=sometimes(0.15),
        even=sometimes(0.8),
        drop_last=sometimes(0.2),
        evaluation=pick(["", "", "epoch", "batch", "kept"]),
        held_out=choose.randrange(5, 12),
        stop=pick(["", "", "", "break", "continue"]),
        stop_at=choose.randrange(0, 5),
        frozen=pick(["", "", "", "", "start", "later", "thawed", "group"]),
        checkpoint=sometimes(0.15),
    )
    if loop.world == 2 and sometimes(0.2):
        loop = replace(loop, strategy="fsdp")
    return make_valid(loop)


Rule = tuple[Callable[[Loop], Any], dict[str, Any]]
RULES: tuple[Rule, ...] = (
    # A closure is called by the step, with all that a micro-batch does.
    (lambda l: l.closure, {"family": "one", "clip": "", "guard_step": False, "outside": False}),
    (lambda l: l.closure and l.is_manual, {"accumulation": "none"}),
    (lambda l: l.closure and l.accumulation == "constant", {"accumulation": "accumulate"}),
    (lambda l: l.closure and l.accumulation == "none", {"optimizer": "lbfgs"}),
    (lambda l: l.accumulation == "none", {"steps": 1}),
    (lambda l: l.is_manual and l.steps == 1, {"accumulation": "none"}),
    (lambda l: l.accumulation == "no_sync" and len(l.models) > 1, {"family": "one"}),
    # Torch's schedulers refuse a group that was added.
    (lambda l: l.frozen == "group", {"scheduler": "", "family": "one"}),
    (lambda l: l.frozen and l.family not in ("one", "two losses", "pair"), {"frozen": ""}),
    # The micro-batches of a constant global batch depend on the number of ranks: what the loop does in each of
    # them, other than to add gradients, is not what it does in the whole batch.
    (
        lambda l: l.accumulation == "constant",
        {"stop": "", "loaders": "one", "change": None, "even": True, "split": False, "ends_with_loader": True},
    ),
    (lambda l: l.accumulation == "constant" and l.family in ("gan", "parts apart"), {"family": "pair"}),
    (lambda l: l.accumulation == "constant" and l.evaluation != "", {"evaluation": "epoch"}),
    (lambda l: l.accumulation == "constant" and l.scheduler == "plateau", {"scheduler": "step"}),
    (lambda l: l.accumulation == "constant" and not l.policy, {"policy": True}),
    # One backward pass is for both optimizers.
    (lambda l: l.family in ("parts", "chain"), {"phased": True}),
    (lambda l: l.family in ("one", "retained", "two losses"), {"phased": False}),
    # The first call would remove the gradients of the second optimizer.
    (lambda l: l.family == "parts" and (l.zero, l.zero_how) == ("step", "model"), {"zero_how": "optimizer"}),
    # The gradients of the second loss in the parameters of the first optimizer are not removed before its next
    # loss. That is plain torch too, but they have no number of items.
    (
        lambda l: l.counts_items and l.family in ("parts apart", "gan") and l.zero == "step",
        {"zero": "end"},
    ),
    # The second model has windows of its own, if it is not trained in each micro-batch.
    (lambda l: l.family not in ("pair", "gan") or not l.is_accumulated, {"apart": False}),
    (lambda l: not l.apart and (l.accumulation != "none" or l.family not in ("pair", "gan")), {"every": 1}),
    (lambda l: l.apart or l.every > 1, {"phased": False}),
    # Such a call would drop what was accumulated, also in plain torch.
    (lambda l: l.is_manual or (l.in_windows and l.outside), {"guard_step": False}),
    (lambda l: l.is_manual and l.zero != "end", {"zero": "step"}),
    (lambda l: l.accumulation == "no_sync", {"guard_clip": True}),  # ranks have gradients of their own
    (lambda l: not l.is_accumulated and not l.in_windows, {"change": None, "early": False}),
    (lambda l: not l.is_accumulated, {"ends_with_loader": True}),
    (lambda l: not l.in_windows, {"outside": False}),
    (lambda l: l.in_windows and l.stop == "continue", {"stop": "leave"}),
    (lambda l: l.stop == "leave" and l.outside, {"clip": ""}),  # torch refuses to clip without gradients
    (lambda l: l.in_windows and l.loaders != "one", {"loaders": "cycled"}),
    # Both loaders would deliver one batch for each micro-batch, and either may end a window.
    (lambda l: l.loaders == "nested" and l.stop == "break" and not l.stop_at, {"stop_at": 1}),
    (lambda l: l.loaders == "nested", {"samples": 10, "epochs": 2, "second_samples": 13}),
    (lambda l: l.scheduler == "plateau" and l.schedule == "before", {"schedule": "step"}),  # needs the loss
    # DistributedDataParallel needs equally many batches on all ranks.
    (lambda l: l.split, {"even": True}),
    (lambda l: not l.even, {"drop_last": False}),
    # A checkpoint has no unfinished window, and continues the passes that have begun.
    (
        lambda l: (
            l.stop or l.loaders != "one" or l.evaluation == "kept" or l.every > 1 or not l.ends_with_loader
        ),
        {"checkpoint": False},
    ),
    (lambda l: l.is_manual or l.frozen == "group", {"checkpoint": False}),
)


def make_valid(loop: Loop) -> Loop:
    """Replace what has no right meaning, and what other choices leave without effect."""
    for applies, changes in RULES:
        if applies(loop):
            loop = replace(loop, **changes)
    return loop


def write(loop: Loop) -> str:
    """The text of the program."""
    lines = [f"for epoch in range({loop.epochs}):"]
    if loop.frozen in ("later", "thawed", "group"):
        body = f"accelerator.unwrap_model({loop.models[0]}).body"
        change = [f"{body}.requires_grad_({loop.frozen != 'later'})"]
        if loop.frozen == "group":
            change.append(f'optimizer.add_param_group({{"params": list({body}.parameters())}})')
        lines += shift(["if epoch == 1:", *shift(change)])
    lines += shift(write_pass(loop))
    if loop.schedule == "epoch":
        lines += shift([write_schedule(loop, name) for name in schedulers_of(loop)])
    if loop.evaluation == "epoch":
        lines += shift(EVALUATION)
    if loop.checkpoint:
        lines += shift(["if epoch == 0:", "    accelerator.save_state(folder)"])
        lines += shift(["if epoch == 1:", "    accelerator.load_state(folder)"])
    lines += shift([f"log_weights({', '.join(loop.models)}, {', '.join(FAMILIES[loop.family])})"])
    first = [f"{name} = iter({source})" for name, source in iterators_of(loop).items()]
    return "\n".join([*first, *lines]).replace("MODEL", loop.models[0])


EVALUATION = [
    "MODEL.eval()",
    "seen = []",
    "for a, b, *_ in held_out:",
    "    with torch.no_grad():",
    "        seen.append(accelerator.gather_for_metrics((MODEL(a) - b) ** 2))",
    "log_metric(torch.cat(seen))",
    "MODEL.train()",
]
KEPT = [
    "with torch.no_grad():",
    "    log_metric(accelerator.gather_for_metrics((MODEL(rest[0]) - rest[1]) ** 2))",
]


def shift(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def iterators_of(loop: Loop) -> dict[str, str]:
    names = {"again": "second_loader"} if loop.loaders == "cycled" else {}
    return names | ({"kept": "held_out"} if loop.evaluation == "kept" else {})


def next_of(name: str, source: str, target: str) -> list[str]:
    begin = [f"{name} = iter({source})", f"{target} = next({name})"]
    return [f"{target} = next({name}, None)", f"if {target} is None:", *shift(begin)]


def write_pass(loop: Loop) -> list[str]:
    """The loop over a loader."""
    models = ", ".join(loop.models)
    at = f"epoch == {loop.change[0]} and i == {loop.change[1]}" if loop.change else ""
    top = [f"if {at}:", f"    accelerator.gradient_accumulation_steps = {loop.change[2]}"] if loop.change else []
    if loop.stop == "continue":
        top += [f"if i == {loop.stop_at}:", "    continue"]
    if loop.evaluation == "batch":
        top += ["if i % 3 == 1:", *shift(EVALUATION)]
    if loop.evaluation == "kept":
        top += [*next_of("kept", "held_out", "rest"), *KEPT]
    body = next_of("again", "second_loader", "(u, v, counts, part)") if loop.loaders == "cycled" else []
    body = [line.replace("(u, v, counts, part)", "extra") for line in body]
    body += ["u, v, counts, part = extra"] if loop.loaders == "cycled" else []
    inner, outer = write_steps(loop)
    stop = [f"if i == {loop.stop_at}:", "    break"] if loop.stop == "break" else []
    batch = "(x, y, items, share)"
    match loop.loaders:
        case "zip":
            head = f"for i, ({batch}, (u, v, counts, part)) in enumerate(zip(loader, second_loader)):"
        case "nested":
            head = f"for i, {batch} in enumerate(second_loader):"
        case _:
            head = f"for i, {batch} in enumerate(loader):"
    if not loop.in_windows:
        lines = [head, *shift(top + body + inner + outer + stop)]
        return ["for outer in loader:", *shift(lines)] if loop.loaders == "nested" else lines
    counts = ", num_items=lambda batch: batch[2].sum()" if loop.counts_items else ""
    leave = [f"if i == {loop.stop_at} and number == 1:", "    break"] if loop.stop == "leave" else []
    window = [f"for number, {batch} in enumerate(window):", *shift(body + inner + leave)]
    windows = f"accelerator.windows(loader, {models}{counts})"
    return [f"for i, window in enumerate({windows}):", *shift(top + window + outer + stop)]


@dataclass
class Unit:
    """What a micro-batch does for one optimizer."""

    optimizer: str
    target: str  # the model, or the part of it
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        return self.target.split(".")[0]


def units_of(loop: Loop) -> list[Unit]:
    """The losses of the optimizers."""

    def average(values: str, items: str = "items", share: str = "share") -> str:
        return f"total({values}, {items})" if loop.counts_items else f"mean({values}, {share})"

    def backward(loss: str, options: str = "") -> str:
        divided = f"{loss} / {loop.steps}" if loop.is_manual else loss
        return f"accelerator.backward({divided}{options})"

    output = "other(model({}))" if loop.family == "chain" else "model({})"
    loss = f"loss = {average(f'({output} - y) ** 2').format('x')}"
    if loop.loaders in ("zip", "cycled"):
        loss += f" + 0.5 * {average(f'({output} - v) ** 2', 'counts', 'part')}".format("u")
    units = [Unit(*names) for names in FAMILIES[loop.family].items()]
    units[0].forward, units[0].backward = [loss], [backward("loss")]
    match loop.family:
        case "retained":
            penalty = f"penalty = {average('output ** 2')}"
            units[0].forward = ["output = model(x)", loss.replace("model(x)", "output"), penalty]
            units[0].backward = [backward("loss", ", retain_graph=True"), backward("penalty")]
        case "two losses":
            units[0].backward += [f"penalty = {average('model(x) ** 2')}", backward("penalty")]
        case "parts apart" | "pair":
            units[1].forward = [f"second_loss = {average(f'({units[1].model}(x) + y) ** 2')}"]
            units[1].backward = [backward("second_loss")]
        case "gan":
            fakes = "fakes.detach()" if loop.detached else "fakes"
            loss = f"loss = {average(f'other({fakes}) ** 2 + (other(x) - 1) ** 2')}"
            units[0].forward = ["fakes = model(x)", loss]
            units[0].backward = [backward("loss", "" if loop.detached else ", retain_graph=True")]
            units[1].forward = [f"second_loss = {average('(other(fakes) - 1) ** 2')}"]
            units[1].backward = [backward("second_loss")]
    return units


def write_steps(loop: Loop) -> tuple[list[str], list[str]]:
    """What the loop does for a micro-batch, and behind the micro-batches of a window."""
    units = units_of(loop)
    behind = [line for unit in units for line in write_finish(loop, unit)] if loop.outside else []
    if loop.closure:
        phases = [[write_closure(loop, units[0])]]
    else:
        phases = [
            [write_zero(loop, unit) if loop.zero == "first" else [] for unit in units],
            [unit.forward for unit in units],
            [write_zero(loop, unit) if loop.zero == "forward" else [] for unit in units],
            [unit.backward for unit in units],
            [[] if loop.outside else write_finish(loop, unit) for unit in units],
        ]
    if loop.phased:
        blocks = [[line for phase in phases for lines in phase for line in lines]]
    else:
        blocks = [[line for phase in phases for line in phase[number]] for number in range(len(units))]
    if loop.apart:
        blocks = [write_context(loop, [unit.model], block) for unit, block in zip(units, blocks, strict=True)]
    if loop.every > 1:
        blocks[1] = [f"if i % {loop.every} == 0:", *shift(blocks[1])]
    lines = [line for block in blocks for line in block]
    if not loop.apart:
        lines = write_context(loop, loop.models, lines)
    if loop.zero == "before" and not loop.closure:
        lines = [line for unit in units for line in write_zero(loop, unit)] + lines
    if loop.accumulation != "constant":
        behind_log = [f"log(loss, {', '.join(FAMILIES[loop.family])})"]
    else:
        behind_log = []
    end = [write_schedule(loop, name) for name in schedulers_of(loop)] if loop.schedule == "batch" else []
    if loop.zero == "end" and not loop.closure:
        end += [line for unit in units for line in write_guard(loop, write_zero(loop, unit), loop.is_manual)]
    return (lines + behind_log, behind + end) if loop.outside else (lines + end + behind_log, [])


def write_context(loop: Loop, models: list[str], lines: list[str]) -> list[str]:
    names = ", ".join(models)
    match loop.accumulation:
        case "accumulate" | "constant":
            return [f"with accelerator.accumulate({names}):", *shift(lines)]
        case "items":
            return [f"with accelerator.accumulate({names}, num_items=items.sum()):", *shift(lines)]
        case "no_sync":
            steps = next((number for number, line in enumerate(lines) if line.startswith("if ")), len(lines))
            context = f"nullcontext() if (i + 1) % {loop.steps} == 0 else accelerator.no_sync({names})"
            return [f"with {context}:", *shift(lines[:steps]), *lines[steps:]]
    return lines


def write_guard(loop: Loop, lines: list[str], applies: bool) -> list[str]:
    if not applies or not lines:
        return lines
    condition = f"(i + 1) % {loop.steps} == 0" if loop.is_manual else "accelerator.sync_gradients"
    return [f"if {condition}:", *shift(lines)]


def write_zero(loop: Loop, unit: Unit) -> list[str]:
    names = {
        "optimizer": f"{unit.optimizer}.zero_grad()",
        "model": f"{unit.model}.zero_grad()",
        "zeros": f"{unit.optimizer}.zero_grad(set_to_none=False)",
    }
    return [names[loop.zero_how]]


def write_finish(loop: Loop, unit: Unit) -> list[str]:
    part = unit.target.partition(".")[2]
    parameters = f"accelerator.unwrap_model({unit.model}).{part}" if part else unit.model
    clips = {
        "": [],
        "norm": [f"accelerator.clip_grad_norm_({parameters}.parameters(), 0.3)"],
        "value": [f"accelerator.clip_grad_value_({parameters}.parameters(), 0.05)"],
    }
    guards_clip = loop.guard_clip and not loop.outside and not loop.guard_step and not loop.is_manual
    lines = write_guard(loop, clips[loop.clip], guards_clip)
    names = [name for name in schedulers_of(loop) if name == scheduler_of(unit.optimizer)]
    schedule = [write_schedule(loop, name) for name in names]
    lines += schedule if loop.schedule == "before" else []
    lines.append(f"{unit.optimizer}.step()")
    lines += schedule if loop.schedule == "step" else []
    lines += write_zero(loop, unit) if loop.zero == "step" else []
    return write_guard(loop, lines, loop.guard_step or loop.is_manual)


def write_closure(loop: Loop, unit: Unit) -> list[str]:
    body = [*write_zero(loop, unit), *unit.forward, *unit.backward, "return loss"]
    schedule = [write_schedule(loop, name) for name in schedulers_of(loop)]
    lines = ["def closure():", *shift(body), f"loss = {unit.optimizer}.step(closure)"]
    return lines + (schedule if loop.schedule in ("step", "before") else [])


def scheduler_of(optimizer: str) -> str:
    return optimizer.replace("optimizer", "scheduler")


def schedulers_of(loop: Loop) -> list[str]:
    return [scheduler_of(name) for name in FAMILIES[loop.family]] if loop.scheduler else []


def write_schedule(loop: Loop, name: str) -> str:
    reduction = "sum" if loop.counts_items else "mean"
    metric = f'accelerator.reduce(loss.detach(), "{reduction}").item()' if loop.scheduler == "plateau" else ""
    return f"{name}.step({metric})"


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


def run_program(text: str, accelerator: Any, objects: dict[str, Any], reduction: str, folder: str) -> list[Event]:
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

    functions = {"log": log, "log_weights": log_weights, "log_metric": log_metric, "mean": mean, "total": total}
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
    for name in FAMILIES[loop.family]:
        optimizer = plain.Optimizer(objects[name], accelerator)
        accelerator.optimizers.append(optimizer)
        objects[name] = optimizer
        if loop.scheduler:
            other = scheduler_of(name)
            objects[other] = plain.Scheduler(objects[other], optimizer, steps if loop.policy else 0)
    return run_program(write(loop), accelerator, objects, "mean", "")


def run_prepared(loop: Loop, folder: str) -> list[Event]:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    options: dict[str, Any] = {"num_steps": 1 if loop.is_manual else loop.steps, "sync_each_batch": loop.early}
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


def run_jobs(jobs: list[tuple[int, Loop]], root: str) -> None:
    """Run loops one after another on a rank, until one raises an error, and write their results to a file."""
    with Path(f"results_{PartialState().process_index}").open("wb") as file:
        for number, loop in jobs:
            result = run_one(loop, str(Path(root) / str(number)))
            pickle.dump(result, file)
            file.flush()
            if result.outcome in ("refused", "raised") and PartialState().num_processes > 1:
                return  # the ranks may have stopped at different places


def run(seeds: list[int], ask: Any) -> dict[int, str]:
    """Run trials, and return what each of them has found; empty text where nothing differs in silence."""
    groups: defaultdict[int, list[tuple[int, Loop]]] = defaultdict(list)
    for seed in seeds:
        groups[draw(seed).world].append((seed, draw(seed)))
    results = {seed: each for world, jobs in groups.items() for seed, each in ask(run_jobs, jobs, world).items()}
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
    return describe_loop(draw(seed))


def describe_loop(loop: Loop) -> str:
    """The text of a loop, with the settings that are not those of the simplest one."""
    changed = {f.name: getattr(loop, f.name) for f in fields(loop) if getattr(loop, f.name) != f.default}
    settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return f"  {settings}\n{indent(write(loop), '    ')}"
