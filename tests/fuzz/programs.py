"""Programs of training loops, which are drawn from seeds.

A `Loop` is what is drawn, and `write` returns its program: the text of a user's training script. `RULES` say
which combinations have no right meaning.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from textwrap import indent
from typing import Any

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "fused")  # and "lbfgs" for closures
SCHEDULERS = ("exponential", "step", "lambda", "sequential", "chained", "plateau")
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
    accumulation: str = (
        "none"  # "accumulate", "items", "windows", "window items", "constant", "manual", "no_sync"
    )
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
        optimizer=pick(OPTIMIZERS),
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
    elif loop.world == 2 and sometimes(0.06):
        loop = replace(loop, strategy="replicas")
    return make_valid(loop)


Rule = tuple[Callable[[Loop], Any], dict[str, Any]]
RULES: tuple[Rule, ...] = (
    # A closure is called by the step, with all that a micro-batch does.
    (lambda d: d.closure, {"family": "one", "clip": "", "guard_step": False, "outside": False}),
    (lambda d: d.closure and d.is_manual, {"accumulation": "none"}),
    (lambda d: d.closure and d.accumulation == "constant", {"accumulation": "accumulate"}),
    (lambda d: d.closure and d.accumulation == "none", {"optimizer": "lbfgs"}),
    # Replica groups divide a global batch, and each has losses of its own. They step after each batch.
    (
        lambda d: d.strategy == "replicas",
        {"split": False, "even": True, "policy": "per_update", "loaders": "one", "stop": ""},
    ),
    (lambda d: d.strategy == "replicas", {"checkpoint": False, "guard_step": False, "change": None}),
    (lambda d: d.strategy == "replicas" and d.scheduler == "plateau", {"scheduler": "step"}),
    (
        lambda d: d.strategy == "replicas" and d.accumulation != "none",
        {"accumulation": "accumulate", "ends_with_loader": True},
    ),
    (lambda d: d.accumulation == "none", {"steps": 1}),
    (lambda d: d.is_manual and d.steps == 1, {"accumulation": "none"}),
    (lambda d: d.accumulation == "no_sync" and len(d.models) > 1, {"family": "one"}),
    # Torch's schedulers refuse a group that was added.
    (lambda d: d.frozen == "group", {"scheduler": "", "family": "one"}),
    (lambda d: d.frozen and d.family not in ("one", "two losses", "pair"), {"frozen": ""}),
    # The micro-batches of a constant global batch depend on the number of ranks. What the loop does in each
    # of them, other than adding gradients, differs from what it does in the whole batch.
    (
        lambda d: d.accumulation == "constant",
        {
            "stop": "",
            "loaders": "one",
            "change": None,
            "even": True,
            "split": False,
            "ends_with_loader": True,
        },
    ),
    (lambda d: d.accumulation == "constant" and d.family in ("gan", "parts apart"), {"family": "pair"}),
    (lambda d: d.accumulation == "constant" and d.evaluation != "", {"evaluation": "epoch"}),
    (lambda d: d.accumulation == "constant" and d.scheduler == "plateau", {"scheduler": "step"}),
    (lambda d: d.accumulation == "constant" and not d.policy, {"policy": True}),
    # One backward pass is for both optimizers.
    (lambda d: d.family in ("parts", "chain"), {"phased": True}),
    (lambda d: d.family in ("one", "retained", "two losses"), {"phased": False}),
    # The first call would remove the gradients of the second optimizer.
    (lambda d: d.family == "parts" and (d.zero, d.zero_how) == ("step", "model"), {"zero_how": "optimizer"}),
    # The gradients of the second loss remain in the parameters of the first optimizer when its next loss is
    # computed, as in plain torch. They have no number of items.
    (lambda d: d.counts_items and d.family in ("parts apart", "gan") and d.zero == "step", {"zero": "end"}),
    # The second model has windows of its own, if it is not trained in each micro-batch.
    (lambda d: d.family not in ("pair", "gan") or not d.is_accumulated, {"apart": False}),
    (lambda d: not d.apart and (d.accumulation != "none" or d.family not in ("pair", "gan")), {"every": 1}),
    (lambda d: d.apart or d.every > 1, {"phased": False}),
    # Such a call would drop what was accumulated, also in plain torch.
    (lambda d: d.is_manual or (d.in_windows and d.outside), {"guard_step": False}),
    (lambda d: d.is_manual and d.zero != "end", {"zero": "step"}),
    (lambda d: d.accumulation == "no_sync", {"guard_clip": True}),  # ranks have gradients of their own
    (lambda d: not d.is_accumulated and not d.in_windows, {"change": None, "early": False}),
    (lambda d: not d.is_accumulated, {"ends_with_loader": True}),
    (lambda d: not d.in_windows, {"outside": False}),
    (lambda d: d.in_windows and d.stop == "continue", {"stop": "leave"}),
    (lambda d: d.stop == "leave" and d.outside, {"clip": ""}),  # torch refuses to clip without gradients
    (lambda d: d.in_windows and d.loaders != "one", {"loaders": "cycled"}),
    # Both loaders would deliver one batch for each micro-batch, and either may end a window.
    (lambda d: d.loaders == "nested" and d.stop == "break" and not d.stop_at, {"stop_at": 1}),
    (lambda d: d.loaders == "nested", {"samples": 10, "epochs": 2, "second_samples": 13}),
    (lambda d: d.scheduler == "plateau" and d.schedule == "before", {"schedule": "step"}),  # needs the loss
    # DistributedDataParallel needs equally many batches on all ranks.
    (lambda d: d.split, {"even": True}),
    (lambda d: not d.even, {"drop_last": False}),
    (lambda d: d.optimizer == "lbfgs" and d.frozen == "group", {"frozen": ""}),  # it has one group
    # A checkpoint has no gradients.
    (lambda d: d.family in ("parts apart", "gan") and d.zero == "step", {"checkpoint": False}),
    # A checkpoint has no unfinished window, and continues the passes that have begun.
    (
        lambda d: (
            d.stop or d.loaders != "one" or d.evaluation == "kept" or d.every > 1 or not d.ends_with_loader
        ),
        {"checkpoint": False},
    ),
    (lambda d: d.is_manual or d.frozen == "group", {"checkpoint": False}),
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
    top = (
        [f"if {at}:", f"    accelerator.gradient_accumulation_steps = {loop.change[2]}"]
        if loop.change
        else []
    )
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
        # In windows it is a part of the micro-batch, whose gradients plain torch would drop.
        is_guarded = loop.is_manual or (loop.guard_step and loop.in_windows)
        end += [line for unit in units for line in write_guard(loop, write_zero(loop, unit), is_guarded)]
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


def describe(loop: Loop) -> str:
    """The text of a loop, with the settings that are not those of the simplest one."""
    changed = {f.name: getattr(loop, f.name) for f in fields(loop) if getattr(loop, f.name) != f.default}
    settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    return f"  {settings}\n{indent(write(loop), '    ')}"
