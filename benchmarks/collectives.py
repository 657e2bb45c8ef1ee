"""What a collective of nested data costs between two processes, over the raw call that moves the same bytes.

Both processes take the same turns; the first one prints. Where the raw call writes into a result, the result
is allocated each time, as the library has to: the figures compare what a user would write by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from pairing import Pair, measure, report, time_round
from ranks import start

PROCESSES = 2
MANY, FEW = 40, 4

# The call has another name in older versions of torch.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered_by_hand(flat: torch.Tensor) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        joined = torch.empty((PROCESSES * flat.shape[0], *flat.shape[1:]))
        all_gather(joined, flat)
        return joined

    return work


def reduced_by_hand(flat: torch.Tensor) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        total = flat.clone()
        dist.all_reduce(total)
        return total

    return work


def objects_by_hand(thing: object) -> Callable[[], list[object]]:
    def work() -> list[object]:
        things: list[object] = [None] * PROCESSES
        dist.all_gather_object(things, thing)
        return things

    return work


def small_structures() -> list[Pair]:
    from accelerate.utils import gather, reduce

    flat = torch.randn(32 * 16)
    alike = {f"row {index}": part for index, part in enumerate(flat.view(32, 4, 4).unbind())}
    lengths = [8 + index % 2 * 16 for index in range(32)]
    mixed = list(flat.split(lengths))
    return [
        measure(
            f"{name} of 32 small tensors, {what}",
            by_hand,
            lambda call=call, data=data: call(data),
            budget=2.0,
            repetitions=MANY,
        )
        for name, by_hand, call in (
            ("gather", gathered_by_hand(flat), gather),
            ("reduce", reduced_by_hand(flat), reduce),
        )
        for what, data in (("alike", alike), ("of two shapes", mixed))
    ]


def large_tensors() -> list[Pair]:
    from accelerate.utils import gather, reduce

    large = torch.randn(1 << 20)
    return [
        measure(
            f"{name} of one 4 MB tensor",
            by_hand(large),
            lambda call=call: call(large),
            budget=1.10,
            repetitions=FEW,
        )
        for name, by_hand, call in (
            ("gather", gathered_by_hand, gather),
            ("reduce", reduced_by_hand, lambda tensor: reduce(tensor, "sum")),
        )
    ]


def objects() -> list[Pair]:
    from accelerate.utils import gather_object

    things = (("small", {"loss": 0.5, "names": ["a", "b"]}), ("100 kB", list(range(35_000))))
    return [
        measure(
            f"gather_object, {name}",
            objects_by_hand(thing),
            lambda thing=thing: gather_object(thing),
            budget=1.15,
            repetitions=MANY // 2,
        )
        for name, thing in things
    ]


def bookkeeping() -> list[Pair]:
    """What is done besides moving data: the note of each collective, and the comparison in debug mode."""
    from accelerate import PartialState
    from accelerate.ops import current_transport, flight_recorder
    from accelerate.utils import gather

    def note() -> None:
        flight_recorder().begin("gather", None)
        flight_recorder().end()

    state, small, header = PartialState(), torch.randn(512), current_transport().header
    assert header is not None

    def with_debug(on: bool) -> Callable[[], object]:
        def work() -> object:
            state.debug = on
            return gather(small)

        return work

    noted = min(time_round(note, 2000) for _ in range(20))
    compared = min(time_round(lambda: header.exchange(1), MANY) for _ in range(40))
    pairs = [
        Pair("note of one collective", 0.0, noted, noted, 2e-6, "s"),
        Pair("comparison of one collective, processor time", 0.0, compared, compared, 2e-4, "s"),
        measure(
            "debug mode over none, CPU tensors",
            with_debug(False),
            with_debug(True),
            budget=1.25,
            repetitions=MANY,
        ),
    ]
    state.debug = False
    return pairs


def replicas() -> list[Pair]:
    """What a step does so that replicas stay equal, and one comparison of 40 parameters."""
    from accelerate import Accelerator

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    (reduction,), (check,) = accelerator._runtime.strategy.reductions, optimizer.observers

    def calls() -> None:
        reduction.complete(reduction.begin())
        check.before_step(optimizer)

    noted = min(time_round(calls, 1000) for _ in range(20))
    compared = min(time_round(lambda: check._compare(optimizer), 1) for _ in range(20))
    return [
        Pair("calls of a step that does not compare replicas", 0.0, noted, noted, 1e-5, "s"),
        Pair("comparison of replicas, processor time", 0.0, compared, compared, 1e-2, "s"),
    ]


def run_rank() -> int:
    from accelerate import PartialState

    state = PartialState()
    pairs = [*small_structures(), *large_tensors(), *objects(), *bookkeeping(), *replicas()]
    state.wait_for_everyone()
    missed = report(pairs, "Collectives, two processes on the CPU") if state.is_main_process else 0
    state.wait_for_everyone()
    state.destroy_process_group()
    return missed


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    return min(sum(start(run_rank, PROCESSES)), 1)


if __name__ == "__main__":
    sys.exit(main())
