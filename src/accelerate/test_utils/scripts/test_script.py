"""Self-check that `accelerate test` launches, which prints one line per check and exits with 1 on failure.

Each rank runs each check, and a check fails if it fails on any rank. Ranks gather the results before the next
check begins, so a failure on one rank does not make the others wait in a later collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.base import DistributedType
from accelerate.ops import broadcast, gather, gather_object
from accelerate.rng import set_seed, synchronize_rng_states

SAMPLES = 22
BATCH = 4
STEPS = 5
TOLERANCE = 1e-5


class CheckFailedError(Exception):
    """Failure of a check."""


def expect(condition: bool, problem: str) -> None:
    """Raises a `CheckFailedError` unless the condition is true."""
    if not condition:
        raise CheckFailedError(problem)


def check_state(accelerator: Accelerator) -> None:
    """Checks that ranks are 0 to n-1, that rank 0 is the main process, and that a barrier ends."""
    count, rank = accelerator.num_processes, accelerator.process_index
    expect(0 <= rank < count, f"rank {rank} of {count}")
    expect(accelerator.is_main_process == (rank == 0), "rank 0 is not the main process, or another one is")
    ranks = gather_object([rank])
    expect(sorted(ranks) == list(range(count)), f"the ranks are {ranks}")
    accelerator.wait_for_everyone()
    with accelerator.split_between_processes(list(range(SAMPLES))) as shard:
        shards = gather_object([list(shard)])
    expect(sum(shards, []) == list(range(SAMPLES)), f"split_between_processes gives {shards}")


def check_collectives(accelerator: Accelerator) -> None:
    """Checks the results of gather, reduce, broadcast and pad_across_processes."""
    count, rank = accelerator.num_processes, accelerator.process_index
    local = torch.tensor([rank, 10 + rank], device=accelerator.device)
    gathered = [value for r in range(count) for value in (r, 10 + r)]
    expect(gather(local).tolist() == gathered, "gather does not give the values of all ranks in order")
    total = accelerator.reduce(local, reduction="sum").tolist()
    expect(total == [sum(range(count)), 10 * count + sum(range(count))], f"reduce gives {total}")
    first = broadcast(local.clone(), from_process=0).tolist()
    expect(first == [0, 10], f"broadcast gives {first}")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    expect(padded.shape[0] == count, f"pad_across_processes gives the length {padded.shape[0]}")


def check_random_numbers(accelerator: Accelerator) -> None:
    """Checks that random numbers are equal after synchronization and differ with device-specific seeds."""
    set_seed(7 + accelerator.process_index)
    synchronize_rng_states(["torch"])
    drawn = gather(torch.rand(1).to(accelerator.device))
    expect(bool((drawn == drawn[0]).all()), f"after synchronization the ranks draw {drawn.tolist()}")
    set_seed(7, device_specific=True)
    numbers = gather(torch.rand(1).to(accelerator.device)).tolist()
    expect(len(set(numbers)) == accelerator.num_processes, f"with device_specific seeds they draw {numbers}")


def check_loader(accelerator: Accelerator, *, dispatch: bool, shuffle: bool) -> None:
    """Checks that a loader yields each sample, and that gather_for_metrics removes the padding."""
    set_seed(3)
    samples: Any = list(range(SAMPLES))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=shuffle)
    accelerator.dataloader_config.dispatch_batches = dispatch
    prepared = accelerator.prepare_data_loader(loader)
    accelerator.dataloader_config.dispatch_batches = None
    sizes, seen = set(), []
    for batch in prepared:
        expect(batch.device.type == accelerator.device.type, f"a batch is on {batch.device}")
        sizes.add(int(gather(torch.tensor([len(batch)], device=batch.device)).max()))
        seen += accelerator.gather_for_metrics(batch).tolist()
    expect(sizes == {BATCH} or SAMPLES % BATCH != 0, f"the batches have the sizes {sizes}")
    in_order = seen if not shuffle else sorted(seen)
    expect(in_order == list(range(SAMPLES)), f"the samples seen are {seen}")
    expect(not shuffle or seen != sorted(seen), "shuffle=True does not change the order")


def check_training(accelerator: Accelerator) -> None:
    """Checks that training on all ranks gives the weights of training in one process."""
    prepared = _train(accelerator.num_processes, accelerator)
    reference = _train(accelerator.num_processes)
    worst = max(float((a.cpu() - b).abs().max()) for a, b in zip(prepared, reference, strict=True))
    limit = TOLERANCE if accelerator.mixed_precision == "no" else 0.05
    expect(worst <= limit, f"weights differ from those of one process by {worst:.2e} (limit {limit:.0e})")


def _train(processes: int, accelerator: Accelerator | None = None) -> list[torch.Tensor]:
    """Returns the weights after training on all ranks, or without an accelerator in one process.

    The batches of the single process are the batches of all ranks, concatenated.
    """
    torch.manual_seed(11)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(processes * BATCH * STEPS, 3, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=BATCH if accelerator else processes * BATCH)
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    if accelerator:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    for batch, targets in loader:
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model = accelerator.unwrap_model(model) if accelerator else model
    return [parameter.detach().clone() for parameter in model.parameters()]


CHECKS: dict[str, Callable[[Accelerator], None]] = {
    "state": check_state,
    "collectives": check_collectives,
    "random numbers": check_random_numbers,
    "loader, sharded": lambda a: check_loader(a, dispatch=False, shuffle=False),
    "loader, sharded and shuffled": lambda a: check_loader(a, dispatch=False, shuffle=True),
    "loader, dispatched": lambda a: check_loader(a, dispatch=True, shuffle=False),
    "loader, dispatched and shuffled": lambda a: check_loader(a, dispatch=True, shuffle=True),
    "training equals one process": check_training,
}


def run_check(accelerator: Accelerator, check: Callable[[Accelerator], None]) -> list[str]:
    """Runs one check on all ranks, and returns the same list of their errors on each rank."""
    problems = []
    try:
        check(accelerator)
    except Exception as error:  # any error is reported and makes the exit code 1
        problems = [f"process {accelerator.process_index}: {type(error).__name__}: {error}"]
    return gather_object(problems)


def main() -> None:
    """Runs all checks, and exits with 1 if one has failed."""
    accelerator = Accelerator()
    kind = DistributedType(accelerator.distributed_type).value
    accelerator.print(
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, {kind}, "
        f"mixed_precision={accelerator.mixed_precision}"
    )
    failed = 0
    for name, check in CHECKS.items():
        problems = run_check(accelerator, check)
        accelerator.print(f"{'FAILED' if problems else 'ok':>6}  {name}")
        for problem in problems:
            accelerator.print(f"        {problem}")
        failed += bool(problems)
    accelerator.print("All checks passed." if not failed else f"{failed} of {len(CHECKS)} checks failed.")
    accelerator.end_training()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
