"""What the store of a run has to answer as ranks are added, and what this package adds to a run of processes.

The first part simulates ranks: the real hang detectors and the real agreement on a checkpoint run in a
few processes, eight ranks to a simulated machine, each with a connection of its own to one `TCPStore`.
Requests and bytes are counted at the clients. The second part runs one script with this package and the same
script in plain torch, in real processes over gloo, in turns.

`--write` keeps the figures in `benchmarks/scale.json` and writes the tables of `docs/concepts/scale.md`;
`make pictures` then draws the plot.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from torch.distributed import TCPStore

from accelerate import PartialState
from accelerate.checkpointing import Request, saving
from accelerate.diagnostics.hang_report import Limits
from accelerate.monitoring import PHASES, RankExchange, StepTimes
from accelerate.state import StoreChannel, StoreConsensus, as_dataclass
from constants import constants_table, measure_constants, projected_table
from simulation import CountingStore, Driver, Host, SimulatedRank, call_together, simulate_processes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "scale.json"
GUIDE = ROOT / "docs" / "concepts" / "scale.md"
SIMULATED, PROJECTED = (8, 64, 512, 4096), (1000, 10_000, 100_000)
PROCESSES = (1, 2, 4, 8, 16)
LOCAL = 8
MOST_RANKS_OF_A_PROCESS = 512
CONNECTING = 64
IDLE, WAITING, INQUIRY, AGREEMENT, OWN_HOST, OTHER_HOSTS, RATIO = 0.25, 1.0, 10.0, 6.0, 5.0, 10.0, 1.1
"""The budgets: requests per rank and second, per rank, seconds, and what a figure may be over plain torch."""
SPEED, SPEED_MOST = 1.5, 4
"""Further budgets: requests of one comparison of speeds, per rank and at most."""
LIMITS = Limits(3600.0, False)
WARM_UP, WATCH = 10.0, 16.0
PATIENCE = 120.0
COMPARISONS = 4


@dataclass(frozen=True)
class Simulated:
    """The figures of one number of simulated ranks; requests and bytes are means per rank."""

    ranks: int
    idle_requests: float  # per second
    idle_bytes: float  # per second
    waiting_requests: float  # per second
    waiting_bytes: float  # per second
    inquiry_requests: float  # from a death until all ranks have named it
    inquiry_bytes: float
    named_on_own_host: float  # seconds until the last rank of the machine of the dead one has named it
    named_on_other_hosts: float  # seconds until the last rank has; 0 where there is one machine
    agreement_requests: float
    agreement_most: int  # of the rank with the most
    agreement_bytes: float
    agreement_seconds: float  # until the last rank has returned
    speed_requests: float = 0.0  # of one comparison of the speed of the ranks
    speed_most: int = 0  # of the rank with the most
    speed_bytes: float = 0.0

    def misses(self) -> list[str]:
        budgets = {
            "idle_requests": IDLE,
            "waiting_requests": WAITING,
            "inquiry_requests": INQUIRY,
            "agreement_most": AGREEMENT,
            "speed_requests": SPEED,
            "speed_most": SPEED_MOST,
            "named_on_own_host": OWN_HOST,
            "named_on_other_hosts": OTHER_HOSTS,
        }
        return [f"{self.ranks} ranks: {name}" for name, most in budgets.items() if getattr(self, name) > most]


class Part:
    """Some of the simulated ranks, in a process of their own."""

    def __init__(self, port: int, ranks: Sequence[int], size: int) -> None:
        self.host = Host()
        simulate_processes(self.host)
        PartialState(cpu=True)
        connect = partial(TCPStore, "127.0.0.1", port, is_master=False, wait_for_workers=False)
        # In threads: torch looks up the name of each address, which may take seconds.
        with ThreadPoolExecutor(CONNECTING) as pool:
            stores = list(pool.map(lambda _: connect(timeout=timedelta(seconds=300)), ranks))
        self.ranks = [
            SimulatedRank(CountingStore(store), rank, size, LOCAL, LIMITS)
            for rank, store in zip(ranks, stores, strict=True)
        ]

    def start(self) -> None:
        self.driver = Driver(self.ranks, LIMITS.interval)

    def counts(self) -> tuple[int, int]:
        return sum(rank.store.total for rank in self.ranks), sum(rank.store.bytes for rank in self.ranks)

    def wait(self) -> None:
        began = time.monotonic()
        for rank in self.ranks:
            rank.wait_began = began

    def die(self, number: int) -> float | None:
        for rank in self.ranks:
            if rank.rank == number:
                rank.die(self.host)
                return time.time()
        return None

    def named(self, number: int) -> dict[int, float]:
        return {rank.rank: rank.named_at[number] for rank in self.ranks if number in rank.named_at}

    def stop(self) -> None:
        self.driver.stop()

    def agree(self, folder: str) -> tuple[list[int], list[int], float]:
        """Save a checkpoint without files; requests and bytes of each rank, and when the last returned."""
        before = [(rank.store.total, rank.store.bytes) for rank in self.ranks]
        size = len(self.ranks[0]._peers.others) + 1
        request = Request(Path(folder, "one"), PATIENCE)

        def save(rank: SimulatedRank) -> None:
            channel = StoreChannel(rank.store, "save", {"ACCELERATE_RUN_KEY": "secret"})  # type: ignore[arg-type]
            consensus = StoreConsensus(channel, rank.rank, size)
            saving.write(saving.open_site(request, consensus), [], threads=1)

        call_together(partial(save, rank) for rank in self.ranks)
        after = [(rank.store.total, rank.store.bytes) for rank in self.ranks]
        pairs = list(zip(before, after, strict=True))
        return [b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs], time.time()

    def compare_speeds(self) -> tuple[list[int], list[int]]:
        """Compare the speed of the ranks; requests and bytes of each rank in the last comparison."""
        size = len(self.ranks[0]._peers.others) + 1
        environ = {"ACCELERATE_RUN_KEY": "secret"}
        exchanges = [
            RankExchange(
                StoreChannel(rank.store, "times", environ),  # type: ignore[arg-type]
                as_dataclass,
                rank.rank,
                size,
                rank.rank % LOCAL == 0,
            )
            for rank in self.ranks
        ]
        times = StepTimes(10, 1.0, dict.fromkeys(PHASES, 0.0) | {"forward": 1.0})
        for step in range(COMPARISONS):
            before = [(rank.store.total, rank.store.bytes) for rank in self.ranks]
            for exchange in reversed(exchanges):
                exchange.exchange(step, times)
            time.sleep(1.0)  # the other parts post theirs
        after = [(rank.store.total, rank.store.bytes) for rank in self.ranks]
        pairs = list(zip(before, after, strict=True))
        return [b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs]


def serve(pipe: Connection, port: int, ranks: Sequence[int], size: int) -> None:
    """Run in a separate process: execute the commands of the pipe, and send the results."""
    part = Part(port, ranks, size)
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        name, *arguments = call
        pipe.send(getattr(part, name)(*arguments))


class Parts:
    """All simulated ranks."""

    def __init__(self, port: int, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size, self._pipes, self._processes = size, [], []
        share = max(min(MOST_RANKS_OF_A_PROCESS, size // 2 // LOCAL * LOCAL), LOCAL)
        for first in range(0, size, share):
            own, other = context.Pipe()
            arguments = (other, port, range(first, min(first + share, size)), size)
            self._processes.append(context.Process(target=serve, args=arguments))
            self._processes[-1].start()
            self._pipes.append(own)
        for pipe in self._pipes:
            pipe.recv()

    def call(self, *call: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(call)
        return [pipe.recv() for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()

    def counted(self, act: Callable[[], object]) -> tuple[float, float]:
        """Requests and bytes per rank while something is done."""
        before = self.call("counts")
        act()
        columns = zip(*before, strict=True), zip(*self.call("counts"), strict=True)
        first, last = ([sum(column) for column in part] for part in columns)
        return (last[0] - first[0]) / self.size, (last[1] - first[1]) / self.size


def simulate(size: int) -> Simulated:
    """Measure one number of ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = Parts(store.port, size)
    parts.call("start")
    time.sleep(WARM_UP)
    idle = parts.counted(partial(time.sleep, WATCH))
    parts.call("wait")
    time.sleep(2.0)
    waiting = parts.counted(partial(time.sleep, WATCH))
    dead = size // 2 + 3
    times: dict[int, float] = {}
    parts.call("wait")
    (died,) = [moment for moment in parts.call("die", dead) if moment is not None]

    def name() -> None:
        end = time.monotonic() + PATIENCE
        while len(times) < size - 1 and time.monotonic() < end:
            time.sleep(0.2)
            for answer in parts.call("named", dead):
                times.update(answer)

    inquiry = parts.counted(name)
    own = [seconds - died for rank, seconds in times.items() if rank // LOCAL == dead // LOCAL]
    other = [seconds - died for rank, seconds in times.items() if rank // LOCAL != dead // LOCAL]
    complete = len(times) == size - 1
    parts.call("stop")
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        answers = parts.call("agree", folder)
    speeds = parts.call("compare_speeds")
    parts.end()
    compared = [count for counts, _ in speeds for count in counts]
    requests = [count for counts, _, _ in answers for count in counts]
    sizes = [count for _, counts, _ in answers for count in counts]
    return Simulated(
        size,
        idle[0] / WATCH,
        idle[1] / WATCH,
        waiting[0] / WATCH,
        waiting[1] / WATCH,
        *inquiry,
        max(own) if complete else float("inf"),
        max(other, default=0.0) if complete else float("inf"),
        sum(requests) / size,
        max(requests),
        sum(sizes) / size,
        max(end for _, _, end in answers) - began,
        sum(compared) / size,
        max(compared),
        sum(count for _, counts in speeds for count in counts) / size,
    )


def ask(port: int, seconds: float) -> int:
    """Make requests one after another; how many."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        store.add("counter", 0)
        count += 1
    return count


def measure_store(clients: int = 4, seconds: float = 3.0) -> float:
    """Requests per second that one store answers to a few clients that do nothing else."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        return sum(pool.starmap(ask, [(store.port, seconds)] * clients)) / seconds


SCRIPT = """
import json, os, sys, time
began = float(sys.argv[1])
import torch
torch.set_num_threads(1)
from torch.utils.data import DataLoader, TensorDataset
rank, size, folder, ours = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 64))
layers = [torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 64)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
if ours == "ours":
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    backward, gather = accelerator.backward, accelerator.gather
    save = lambda: accelerator.save_state(folder + "/checkpoint")
    barrier, end = accelerator.wait_for_everyone, accelerator.end_training
else:
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, size, rank))
    backward = lambda loss: loss.backward()
    def gather(tensor):
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)
    def save():
        from torch import save as write
        import random
        os.makedirs(folder + "/new", exist_ok=True)
        def durable(state, name):
            with open(folder + "/new/" + name, "wb") as file:
                write(state, file)
                file.flush()
                os.fsync(file.fileno())
        generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
        durable(generators, f"generators_{rank}.pt")
        if rank == 0:
            durable(model.state_dict(), "model.pt")
            durable(optimizer.state_dict(), "optimizer.pt")
        dist.barrier()
        if rank == 0:
            os.rename(folder + "/new", folder + "/checkpoint")
        dist.barrier()
    barrier, end = dist.barrier, dist.destroy_process_group
def step(batch):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    backward(loss)
    optimizer.step()
    return loss.detach().reshape(1)
times, batches = {}, iter(loader)
loss = step(next(batches))
times["first step"] = time.time() - began
def timed(act, repetitions):
    barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        act()
    return (time.perf_counter() - start) / repetitions
batch = next(batches)
timed(lambda: step(batch), 3)
times["step"] = timed(lambda: step(batch), 20)
times["gather"] = timed(lambda: gather(loss), 60)
times["save"] = timed(save, 1)
barrier()
left = time.time()
end()
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"left": left, **times}, file)
"""
WORK = ("first step", "step", "gather", "save", "exit")


def run_processes(size: int, ours: bool, port: int) -> dict[str, float]:
    """Run the script in real processes; the seconds that the slowest rank took for each part."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        run = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in run.items()} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), str(time.time()), folder, "ours" if ours else "plain"]
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
            )
            for rank in range(size)
        ]
        codes = [process.wait() for process in processes]
        ended = time.time()
        if any(codes):
            raise RuntimeError(f"the script ended with {codes}")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    slowest = {name: max(times[name] for times in ranks) for name in WORK if name != "exit"}
    return {**slowest, "exit": ended - max(times["left"] for times in ranks)}


@dataclass(frozen=True)
class Compared:
    """One part of the script: seconds of the slowest rank in plain torch and with this package, medians."""

    processes: int
    work: str
    plain: float
    ours: float
    ratio: float  # the median over rounds of both


def compare(size: int, rounds: int) -> list[Compared]:
    pairs = []
    for _ in range(rounds):
        pairs.append([run_processes(size, ours, free_port()) for ours in (False, True)])
    figures = []
    for work in WORK:
        plain, ours = ([pair[which][work] for pair in pairs] for which in (0, 1))
        ratio = median(second / first for first, second in zip(plain, ours, strict=True))
        figures.append(Compared(size, work, median(plain), median(ours), ratio))
    return figures


def free_port() -> int:
    """Find a port for the store of a run."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


HEAD = (
    "| ranks | idle, requests per s | waiting, requests per s | inquiry | agreement | named on its machine "
    "| named on other machines | agreed in | speeds |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
)


def simulated_table(figures: Sequence[dict[str, Any]]) -> str:
    rows = [
        f"| {f['ranks']:,} | {f['idle_requests']:.2f} ({f['idle_bytes']:,.0f} B/s) "
        f"| {f['waiting_requests']:.2f} ({f['waiting_bytes']:,.0f} B/s) "
        f"| {f['inquiry_requests']:.1f} ({f['inquiry_bytes'] / 1000:,.1f} kB) "
        f"| {f['agreement_requests']:.1f} ({f['agreement_bytes'] / 1000:,.1f} kB) "
        f"| {f['named_on_own_host']:.1f} s | {_seconds(f['named_on_other_hosts'])} "
        f"| {f['agreement_seconds']:.2f} s "
        f"| {f.get('speed_requests', 0.0):.2f} ({f.get('speed_bytes', 0.0):,.0f} B) |"
        for f in figures
    ]
    seconds = f"{OWN_HOST:g} s | {OTHER_HOSTS:g} s"
    budgets = f"| budget | {IDLE} | {WAITING:g} | {INQUIRY:g} | {AGREEMENT:g} | {seconds} | | {SPEED:g} |"
    return HEAD + "\n".join([*rows, budgets])


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value else "-"


def compared_table(figures: Sequence[dict[str, Any]]) -> str:
    sizes = list(dict.fromkeys(figure["processes"] for figure in figures))
    by_key = {(figure["work"], figure["processes"]): figure for figure in figures}
    head = f"| | {' | '.join(f'{size} processes' for size in sizes)} |\n|---|{'---:|' * len(sizes)}\n"
    rows = []
    for work in WORK:
        cells = [by_key[work, size] for size in sizes]
        spelled = [f"{1e3 * c['ours']:,.1f} / {1e3 * c['plain']:,.1f} ms, {c['ratio']:.2f} x" for c in cells]
        rows.append(f"| {work} | {' | '.join(spelled)} |")
    return head + "\n".join(rows)


def write_guide(results: dict[str, Any]) -> None:
    """Put the tables between the marks of the guide."""
    text = GUIDE.read_text()
    tables = {
        "simulated": simulated_table(results["simulated"]),
        "compared": compared_table(results["compared"]),
        "constants": constants_table(results["constants"], results["store"]),
        "projected": projected_table(results["constants"], results["store"], PROJECTED),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    GUIDE.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=SIMULATED, help="numbers of simulated ranks"
    )
    parser.add_argument(
        "--processes", type=int, nargs="*", default=PROCESSES, help="numbers of real processes"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each script runs")
    parser.add_argument("--write", action="store_true", help="keep the figures, and write the guide")
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing; write the guide from kept figures"
    )
    arguments = parser.parse_args()
    if arguments.tables:
        write_guide(json.loads(RESULTS.read_text()))
        return 0
    # Of no interest here: how long a name server takes for the names of local addresses.
    os.environ.update(RES_OPTIONS="timeout:1 attempts:1", TORCH_CPP_LOG_LEVEL="ERROR")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    missed = []
    results: dict[str, Any] = {"store": measure_store(), "constants": measure_constants()}
    results |= {"simulated": [], "compared": []}
    print(constants_table(results["constants"], results["store"]), flush=True)
    for size in arguments.simulated:
        simulated = simulate(size)
        missed += simulated.misses()
        results["simulated"].append(asdict(simulated))
        print(simulated_table(results["simulated"][-1:]).splitlines()[2], flush=True)
    for size in arguments.processes:
        compared = compare(size, arguments.rounds)
        missed += [f"{c.processes} processes: {c.work}" for c in compared if c.ratio > RATIO]
        results["compared"] += map(asdict, compared)
        print(
            *(f"{c.processes} {c.work}: {c.ours:.4f} s / {c.plain:.4f} s = {c.ratio:.2f}" for c in compared),
            sep="\n",
            flush=True,
        )
    if arguments.write:
        RESULTS.write_text(f"{json.dumps(results, indent=2)}\n")
        write_guide(results)
    print("\n".join(["missed:", *missed] if missed else ["all within their budgets"]))
    return min(len(missed), 1)


if __name__ == "__main__":
    sys.exit(main())
