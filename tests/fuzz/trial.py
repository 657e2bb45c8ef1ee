"""One trial: a schedule drawn from a seed, trained without a break, and interrupted and resumed."""

from __future__ import annotations

import gc
import pickle
import random
import shutil
import sys
import traceback
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import CheckpointError
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, set_seed

sys.path.insert(0, str(Path(__file__).parent))  # ranks load this file by its path
try:
    import objects
    import sources
    from objects import NEEDS_ONE_PROCESS, OPTIMIZERS, OTHERS
    from sources import SAMPLERS, STATEFUL, STREAMS, WHOLE_SAMPLERS
finally:
    sys.path.pop(0)

EPOCHS = 3
REFUSED = "cannot continue in the middle of this epoch"
SCHEDULERS: dict[str, Any] = {
    "": None,
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@dataclass(frozen=True)
class Schedule:
    """What is trained, how, and where it is interrupted."""

    seed: int
    world: int
    resumed_world: int
    way: str  # "rollback": load in the objects that trained; "rebuild": in new ones; "process": in new ones
    strategy: str  # "ddp", "fsdp"
    source: str
    sampler: str
    samples: int
    batch: int
    drop_last: bool
    workers: int
    persistent: bool
    prefetch: int
    augment: str
    config: dict[str, Any]
    precision: str
    dropout: float
    models: int
    optimizer: str
    scheduler: str
    accumulation: str  # "none", "accumulate", "items", "windows", "constant": a constant global batch
    steps: int
    limit: int | None  # batches behind which the loop breaks an epoch
    evaluation: str  # "", "epoch", "broken", "nested"
    evaluation_workers: int
    blocking: bool
    place: str  # "start", "middle", "last", "between", "end of window"
    fraction: float  # where in the epoch
    lost: int  # batches that are trained behind the save, and lost
    loads_inside: bool  # load before the interrupted pass is closed
    again: int  # batches after the first resume, until a second interruption; 0 for none
    registered: int = 0  # registered objects

    @property
    def resized(self) -> bool:
        return self.world != self.resumed_world

    @property
    def stateful(self) -> bool:
        return bool(self.config.get("use_stateful_dataloader"))


def draw(seed: int) -> Schedule:
    choose = random.Random(seed)
    pick = choose.choice
    world = pick([1, 1, 1, 1, 2, 2, 3])
    way = pick(
        ["rollback", "rollback", "rebuild", "rebuild", "rebuild", "resize"] + ["process"] * (seed % 4 == 0)
    )
    resumed_world = pick([size for size in (1, 2, 3, 4) if size != world]) if way == "resize" else world
    source = pick(["map"] * 8 + list(STREAMS))
    if way == "resize" and source in ("endless", "generator"):
        source = "position"
    sampler = pick(SAMPLERS) if source == "map" else ""
    if way == "resize" and sampler and sampler not in WHOLE_SAMPLERS:
        sampler = "shuffle"
    if way == "resize" and sampler == "batches":  # each rank derives another state of Python's generator
        sampler = "batches with generator"
    config: dict[str, Any] = {}
    dispatch = pick([None, None, True, False])
    if source == "generator" and world > 1:
        dispatch = pick([None, True])
    if dispatch is not None:
        config["dispatch_batches"] = dispatch
    is_dispatched = world > 1 and (dispatch or (dispatch is None and source != "map"))
    for name, share in (
        ("use_stateful_dataloader", 0.35),
        ("use_seedable_sampler", 0.25),
        ("use_constant_memory_sampler", 0.1),
        ("split_batches", 0.2),
    ):
        if choose.random() < share:
            config[name] = True
    if sampler == "replacement":
        config.pop("use_constant_memory_sampler", None)
    if sampler.startswith("batches"):
        config.pop("split_batches", None)
    workers = pick([0, 0, 0, 0, 0, 0, 1, 2])
    augment = pick(["", "", *filter(None, sources.AUGMENTATIONS)])
    draws_in_other_process = workers or is_dispatched or (config.get("dispatch_batches") and world > 1)
    is_shared = sampler == "batches" and world > 1  # the generator of Python is the same on all ranks
    if draws_in_other_process or way == "resize" or is_shared:
        augment = ""
    if augment == "python" and (world > 1 or sampler == "batches"):  # both draw from the same generator
        augment = "torch"
    batch = pick([12]) if config.get("split_batches") else pick([2, 3, 4])
    sizes = max(world, resumed_world) * batch
    samples = choose.randrange(max(17, sizes + 1), max(40, 3 * sizes))
    strategy = "fsdp" if world == 2 and way != "resize" and choose.random() < 0.25 else "ddp"
    limit = pick([None, None, None, 3]) if way != "resize" else None
    if source == "endless":
        limit = pick([3, 5])
    if limit and source in STATEFUL and (is_dispatched or workers):
        source, limit = "stream", None  # how far it is read ahead depends on the clock
    place = pick(["start", "middle", "middle", "middle", "last", "last", "between"])
    if limit and source in STATEFUL and place == "between":  # the state of a pass left early is not saved
        place = "middle"
    if way == "rollback" and world > 2 and place == "start":  # its first pass has other buckets of gradients
        place = "middle"
    accumulation = pick(["none", "none", "accumulate", "items", "windows"])
    if limit and source in STATEFUL:  # else a window may end only where the loop leaves the pass
        accumulation = "none"
    if accumulation == "windows":  # a window is read ahead, and with it random numbers are drawn
        augment = ""
        sampler = "batches with generator" if sampler == "batches" else sampler
    schedule = Schedule(
        seed=seed,
        world=world,
        resumed_world=resumed_world,
        way=way,
        strategy=strategy,
        source=source,
        sampler=sampler,
        samples=samples,
        batch=batch,
        drop_last=not sampler.startswith("batches") and choose.random() < 0.25,
        workers=workers,
        # The state of a dataset, or of its generator, in persistent workers is not saved.
        persistent=bool(workers) and choose.random() < 0.6 and source not in ("counting", "generator"),
        prefetch=pick([1, 2, 3]),
        augment=augment,
        config=config,
        precision=pick(["no", "no", "no", "bf16"]),
        dropout=pick([0.0, 0.5, 0.5]),
        models=pick([1, 1, 1, 2]),
        optimizer=pick(list(OPTIMIZERS)),
        scheduler=pick(list(SCHEDULERS)),
        accumulation=accumulation,
        steps=1 if accumulation == "none" else pick([1, 2, 3]),
        limit=limit,
        evaluation=pick(["", "", "epoch", "broken", "nested"]),
        evaluation_workers=pick([0] * 9 + [1]),
        blocking=choose.random() < 0.7,
        place=place,
        fraction=choose.random(),
        lost=choose.randrange(0, 9),
        loads_inside=choose.random() < 0.4,
        again=pick([0, 0, 1, 2, 3, 5]),
    )
    divides = not (is_dispatched or config.get("dispatch_batches") or config.get("split_batches"))
    if source != "map" or sampler.startswith("batches") or not divides or choose.random() < 0.6:
        return add_objects(schedule)
    schedule = replace(schedule, accumulation="constant", steps=pick([1, 2, 3, 5]), limit=None)
    return add_objects(schedule)


def add_objects(schedule: Schedule) -> Schedule:
    """Returns a schedule that may have another optimizer, and registered objects."""
    choose = random.Random(f"objects {schedule.seed}")
    schedule = replace(schedule, registered=choose.choice([0, 0, 1, 2]))
    is_single = schedule.world == schedule.resumed_world == 1 and schedule.accumulation == "none"
    names = [name for name in OTHERS if is_single or name not in NEEDS_ONE_PROCESS]
    if choose.random() < 0.35:
        schedule = replace(schedule, optimizer=choose.choice(names))
    if schedule.optimizer in NEEDS_ONE_PROCESS:
        schedule = replace(schedule, precision="no")
    return schedule


class Event(NamedTuple):
    """What one batch did; batch -1 is the beginning of an epoch."""

    epoch: int
    batch: int
    samples: list[int]
    loss: float = 0.0
    rate: float = 0.0
    generators: int = 0  # a checksum of the states of the random generators
    synchronized: bool = True


def checksum_of_generators() -> int:
    numbers: Any = np.random.get_state(legacy=False)
    words = (torch.get_rng_state().numpy(), random.getstate()[1], numbers["state"]["key"])
    rest = (numbers["state"]["pos"], numbers["has_gauss"], numbers["gauss"], random.getstate()[2])
    return zlib.crc32(b"".join(np.asarray(part).tobytes() for part in words) + repr(rest).encode())


@dataclass
class Training:
    """The objects of one process of a run, after a full reset."""

    schedule: Schedule
    seed: int
    accelerator: Accelerator = field(init=False)

    def __post_init__(self) -> None:
        s = self.schedule
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        set_seed(self.seed)
        options: dict[str, Any] = {}
        if s.accumulation == "constant":
            size = s.steps * s.batch
            options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(global_batch_size=size)
        else:
            options["gradient_accumulation_steps"] = s.steps
        if s.strategy == "fsdp":
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        self.accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(**s.config), mixed_precision=s.precision, **options
        )
        make_model: Any = objects.Rows if s.optimizer == "sparse" else objects.Model
        models: list[Any] = [make_model(s.dropout) for _ in range(s.models)]
        make_optimizer = {**OPTIMIZERS, **OTHERS}[s.optimizer]
        optimizers = [make_optimizer(model.parameters()) for model in models]
        make = SCHEDULERS[s.scheduler]
        schedulers = [make(optimizer) for optimizer in optimizers] if make else []
        size = 12 if s.config.get("split_batches") else 2
        held_out = DataLoader(sources.Samples(3 * size, ""), size, num_workers=s.evaluation_workers)
        prepared = self.accelerator.prepare(
            *models, *optimizers, *schedulers, sources.make_loader(s), held_out
        )
        self.models = list(prepared[: s.models])
        self.optimizers = list(prepared[s.models : 2 * s.models])
        self.schedulers = list(prepared[2 * s.models : -2])
        self.loader, self.held_out = prepared[-2:]
        self.registered = [objects.Registered(number) for number in range(s.registered)]
        self.accelerator.register_for_checkpointing(*self.registered)
        torch.manual_seed(self.seed + self.accelerator.process_index)

    def events(self, first: int = 0, seen: int = 0) -> Iterator[Event]:
        """Train from a batch of an epoch on, and yield behind each batch, and before each epoch."""
        for epoch in range(first, EPOCHS):
            start = seen if epoch == first else 0
            if not start:
                yield self.event(epoch, -1, [], 0.0)
            skips = start and not self.schedule.stateful
            loader = self.accelerator.skip_first_batches(self.loader, start) if skips else self.loader
            yield from self.epoch(epoch, start, loader)
            self.evaluate()

    def epoch(self, epoch: int, start: int, loader: Any) -> Iterator[Event]:
        for number, (index, inputs) in enumerate(self.micro_batches(loader), start):
            loss = self.train_on(index, inputs)
            if self.schedule.evaluation == "nested" and number % 3 == 1:
                self.evaluate()
            yield self.event(epoch, number, index.flatten().tolist(), loss)
            if number + 1 == self.schedule.limit:
                return

    def micro_batches(self, loader: Any) -> Iterator[Any]:
        accelerator = self.accelerator
        match self.schedule.accumulation:
            case "windows":
                for window in accelerator.windows(loader, *self.models):
                    yield from window
            case "accumulate" | "items" | "constant" as way:
                for batch in loader:
                    items = len(batch[0]) if way == "items" else None
                    with accelerator.accumulate(*self.models, num_items=items):
                        yield batch
            case _:
                yield from loader

    def train_on(self, index: torch.Tensor, inputs: torch.Tensor) -> float:
        total = 0.0
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.train()

            def backward(model: Any = model) -> torch.Tensor:
                losses = (model(inputs) - index / self.schedule.samples).pow(2)
                loss: torch.Tensor = losses.sum() if self.schedule.accumulation == "items" else losses.mean()
                self.accelerator.backward(loss)
                return loss

            def closure(optimizer: Any = optimizer, backward: Any = backward) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = backward()
                return loss

            if self.schedule.optimizer == "lbfgs":
                loss = optimizer.step(closure)
            else:
                loss = backward()
                optimizer.step()
            total += loss.item()
        for own in self.registered:
            own.update()
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return total

    def evaluate(self) -> None:
        if not self.schedule.evaluation:
            return
        for number, (_, inputs) in enumerate(self.held_out):
            for model in self.models:
                model.eval()
                with torch.no_grad():
                    model(inputs)
            if number == 1 and self.schedule.evaluation == "broken":
                break

    def event(self, epoch: int, batch: int, samples: list[int], loss: float) -> Event:
        if batch >= 0 and self.schedule.resized:
            samples = self.accelerator.gather_for_metrics(torch.tensor(samples)).tolist()
        rate = self.optimizers[0].param_groups[0]["lr"]
        synchronized = self.accelerator.sync_gradients
        return Event(epoch, batch, samples, loss, rate, checksum_of_generators(), synchronized)

    def release(self) -> None:
        """End the workers of all loaders: they are in cycles of references."""
        has_workers = self.schedule.workers or self.schedule.evaluation_workers
        self.accelerator.free_memory()
        self.__dict__.clear()
        if has_workers:
            gc.collect()

    def weights(self) -> list[float]:
        tensors = [parameter.detach() for model in self.models for parameter in model.parameters()]
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        values = [value for tensor in local for value in tensor.flatten().tolist()]
        return [*values, *(own.checksum() for own in self.registered)]


@dataclass
class Result:
    """What one rank recorded, or found out."""

    difference: str = ""
    refused: bool = False
    before: list[Event] = field(default_factory=list)
    whole: list[Event] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def choose_stop(schedule: Schedule, whole: list[Event]) -> tuple[int, int]:
    """Where the checkpoint is saved: behind a batch of an epoch, or before its first one (-1)."""
    epoch = 1 if schedule.fraction < 0.8 or EPOCHS < 3 else 0
    batches = sum(event.epoch == epoch and event.batch >= 0 for event in whole)
    match schedule.place:
        case "start":
            return 0, -1
        case "between":  # not before the first one, where `draw` leaves out "start"
            return max(epoch, int(schedule.way == "rollback" and schedule.world > 2)), -1
        case "last" if not schedule.limit:  # the loop leaves the pass there, and the checkpoint is in it
            return epoch, batches - 1
    return epoch, int(schedule.fraction * 7919 % 1 * max(batches - 1, 0))


def find_stop(schedule: Schedule, whole: list[Event]) -> Event:
    """The batch behind which the checkpoint is saved; in windows, the last one of its window."""
    stop = choose_stop(schedule, whole)
    # Where a loop leaves a pass, a checkpoint behind its last batch is one in the middle of the pass.
    behind = (event for event in whole if event[:2] >= stop and event.batch + 1 != schedule.limit)
    if schedule.accumulation in (
        "windows",
        "items",
        "constant",
    ):  # gradients of a part of a window are not saved
        return next(event for event in behind if event.synchronized)
    return next(behind)


def run_before(schedule: Schedule, folder: Path) -> tuple[Result, Training, Event]:
    """Train without a break, then train up to the checkpoint and a little further."""
    whole = Training(schedule, schedule.seed)
    events = list(whole.events())
    result = Result(whole=events, weights=whole.weights())
    stop = find_stop(schedule, events)
    whole.release()
    training = Training(schedule, schedule.seed)
    source = training.events()
    for event in source:
        result.before.append(event)
        if event[:2] == stop[:2]:
            break
    training.accelerator.save_state(folder, blocking=schedule.blocking)
    lost = sum(1 for _, event in zip(range(schedule.lost), source, strict=False))
    assert lost <= schedule.lost
    training.accelerator.wait_for_checkpoint()
    if schedule.way == "rollback" and schedule.loads_inside:
        training.accelerator.load_state(folder)
    source.close()  # type: ignore[attr-defined]
    return result, training, stop


def run_after(
    schedule: Schedule, folder: Path, stop: Event, training: Training, loads: bool = True
) -> Result:
    if loads:
        training.accelerator.load_state(folder)
    source = training.events(stop.epoch, stop.batch + 1)
    after: list[Event] = []
    batches = 0
    for event in source:
        after.append(event)
        batches += event.batch >= 0
        is_last = event.batch + 1 == schedule.limit  # the pass is left there, see find_stop
        if 0 < schedule.again <= batches and event.batch >= 0 and event.synchronized and not is_last:
            interrupt_again(training, folder.with_name(f"{folder.name}_again"), source)
            source = training.events(event.epoch, event.batch + 1)
            break
    return Result(after=[*after, *source], weights=training.weights())


def interrupt_again(training: Training, folder: Path, source: Iterator[Event]) -> None:
    """Save a resumed run, and load it in new objects."""
    schedule = training.schedule
    training.accelerator.save_state(folder)
    source.close()  # type: ignore[attr-defined]
    training.release()
    training.__init__(schedule, 98)  # type: ignore[misc]
    training.accelerator.load_state(folder)


def compare(whole: Result, resumed: Result, schedule: Schedule, stop: Event) -> str:
    """The first difference between two runs of one rank; empty where they are the same."""
    expected = [event for event in whole.whole if event.batch >= 0]
    actual = [event for event in [*whole.before, *resumed.after] if event.batch >= 0]
    if schedule.resized and schedule.accumulation == "constant":
        return compare_steps(expected, actual)
    if schedule.resized:
        return compare_sets(expected, actual, schedule)
    for one, other in zip(expected, actual, strict=False):
        if one[:3] != other[:3]:
            return f"samples: {one[:3]} became {other[:3]}"
        if stop.synchronized and one != other:
            return f"{one} became {other}"
    if len(expected) != len(actual):
        return f"{len(expected)} batches became {len(actual)}"
    if stop.synchronized and whole.weights != resumed.weights:
        return "other weights"
    return ""


def compare_steps(expected: list[Event], actual: list[Event]) -> str:
    """The first optimizer step with other samples or another learning rate."""
    wanted, found = (list(steps(events)) for events in (expected, actual))
    for one, other in zip(wanted, found, strict=False):
        if one != other:
            return f"the step {one} became {other}"
    return "" if len(wanted) == len(found) else f"{len(wanted)} steps became {len(found)}"


def steps(events: list[Event]) -> Iterator[tuple[int, list[int], float]]:
    """Yields epoch, samples and learning rate of each optimizer step."""
    samples: list[int] = []
    for event in events:
        samples += event.samples
        if event.synchronized:
            yield event.epoch, sorted(samples), event.rate
            samples = []


def compare_sets(expected: list[Event], actual: list[Event], schedule: Schedule) -> str:
    for epoch in range(EPOCHS):
        one, other = (
            sorted(sample for event in events if event.epoch == epoch for sample in event.samples)
            for events in (expected, actual)
        )
        if schedule.drop_last:  # how much is dropped depends on the world size
            if len(set(other)) != len(other):
                return f"epoch {epoch} has samples twice: {other}"
        elif one != other:
            return f"the samples of epoch {epoch}, {one}, became {other}"
    return ""


def run_one(seed: int, phase: str, root: str, stop: Event | None = None) -> Result:
    """Run one phase of a trial on a rank: "both", "before" or "after"."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # by torchdata
    schedule, folder = draw(seed), Path(root) / str(seed)
    if phase == "after":
        assert stop is not None
        training = Training(schedule, 99)
        try:
            resumed = run_after(schedule, folder, stop, training)
            training.release()
            return resumed
        except CheckpointError as error:
            if REFUSED in str(error) and schedule.resized:
                return Result(refused=True)
            raise
    result, training, stop = run_before(schedule, folder)
    if phase == "before":
        training.release()
        return result
    if schedule.way == "rebuild":
        training.release()
        training = Training(schedule, 99)
    loads = not (schedule.way == "rollback" and schedule.loads_inside)
    resumed = run_after(schedule, folder, stop, training, loads)
    training.release()
    return Result(compare(result, resumed, schedule, stop))


def run_jobs(jobs: list[tuple[int, str, Event | None]], root: str) -> None:
    """Runs trials one after another on a rank, and writes their results to a file.

    A failure of one process is a difference.
    """
    with Path(f"results_{PartialState().process_index}").open("wb") as file:
        for seed, phase, stop in jobs:
            try:
                result = run_one(seed, phase, root, stop)
            except Exception:
                if PartialState().num_processes > 1:  # the other ranks may wait for this one
                    raise
                result = Result(traceback.format_exc())
            PartialState().wait_for_everyone()
            if phase != "before" and PartialState().is_main_process:
                for name in (str(seed), f"{seed}_again"):
                    shutil.rmtree(Path(root) / name, ignore_errors=True)
            pickle.dump(result, file)
            file.flush()


def describe(seed: int) -> str:
    return "\n".join(f"  {name} = {value!r}" for name, value in asdict(draw(seed)).items())
