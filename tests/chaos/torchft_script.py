"""The same training with torchft alone, and a program that starts its replica groups again.

It follows the example of torchft, with two differences. The timeout of heartbeats is that of this package.
Gradients are averaged with `Manager.allreduce`, because the hook of torchft's DistributedDataParallel raises
an AssertionError in the groups that continue (torchft 0.2.0). The position of the loader is saved after each
step, as torchft recommends. Without a variable that names the replica group, this program starts the
lighthouse and all replica groups.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from accelerate.launch.backends.replicas import HEARTBEAT_MILLISECONDS, TICK_MILLISECONDS
from chaos.training import (
    BATCH,
    EPOCHS,
    FOLDER,
    MEMBERS,
    PAUSE,
    STEPS_PER_EPOCH,
    Member,
    make_data,
    make_model,
)

VARIABLE = "CHAOS_REPLICA"
COLLECTIVE_TIMEOUT, TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)  # those of torchft's example
STEPS = EPOCHS * STEPS_PER_EPOCH
SAVE_EVERY = 4 * STEPS_PER_EPOCH
POLL = 0.05
JOIN_MILLISECONDS = 10_000


def train(replica: int) -> None:
    """Trains as one replica group."""
    logging.disable(logging.CRITICAL)
    torch.manual_seed(replica)
    member = Member(replica)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE_TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"{replica:05d}",
        hostname="localhost",
    )
    optimizer = Optimizer(manager, inner)
    data: Any = make_data()
    sampler = DistributedSampler(data, replica, MEMBERS, group_rank=0, num_replicas=1, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    position = FOLDER / f"position-{replica}"
    epoch, batch = map(int, position.read_text().split()) if position.exists() else (0, 0)
    samples: list[int] = []

    def on_step(*_: object) -> None:
        member.log_step(manager.current_step(), epoch, samples, manager.num_participants())
        member.fail("step")

    inner.register_step_pre_hook(on_step)
    member.log.write("start", step=0)
    while manager.current_step() < STEPS:
        sampler.set_epoch(epoch)
        for number, (rows, labels, numbers) in enumerate(loader):
            if number < batch:
                continue
            member.fail("batch")
            member.fail("exit")
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.register_hook(lambda _: member.fail("backward"))
            loss.backward()
            samples[:] = numbers.tolist()
            member.log_attempt(manager.current_step() + 1, epoch, samples, manager.num_participants())
            average_gradients(manager, model)
            time.sleep(PAUSE)
            optimizer.step()
            write(position, f"{epoch} {number + 1}")
            if manager.current_step() % SAVE_EVERY == 0 and manager.participating_rank() == 0:
                member.fail("save")
                torch.save({**state_dict(), "manager": manager.state_dict()}, FOLDER / "checkpoint.pt")
            if manager.current_step() >= STEPS:
                break
        epoch, batch = epoch + 1, 0
    member.log_weights(model.state_dict())
    manager.shutdown(wait=False)


def average_gradients(manager: Manager, model: nn.Module) -> None:
    """Averages all gradients over the replica groups in one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def write(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def start(replica: int, lighthouse: str) -> subprocess.Popen[bytes]:
    variables = {**os.environ, VARIABLE: str(replica), "TORCHFT_LIGHTHOUSE": lighthouse}
    return subprocess.Popen([sys.executable, __file__], env=variables)


def start_all() -> int:
    """Starts the replica groups, and those that fail again until one has ended."""
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=JOIN_MILLISECONDS,
        quorum_tick_ms=TICK_MILLISECONDS,
        heartbeat_timeout_ms=HEARTBEAT_MILLISECONDS,
    )
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    children = {replica: start(replica, address) for replica in range(MEMBERS)}
    while not any(child.poll() == 0 for child in children.values()):
        ended = [replica for replica, child in children.items() if child.poll() is not None]
        children.update({replica: start(replica, address) for replica in ended})
        time.sleep(POLL)
    deadline = time.monotonic() + 10
    while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
        time.sleep(POLL)
    for child in children.values():
        child.kill()
        child.wait()
    lighthouse.shutdown()
    return 0


if __name__ == "__main__":
    if VARIABLE in os.environ:
        train(int(os.environ[VARIABLE]))
    else:
        sys.exit(start_all())
