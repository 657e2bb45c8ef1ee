"""Which ports other machines can connect to, and what unsigned values in the store can do."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from accelerate import Accelerator
from accelerate.launch import KEY_VARIABLE

NEEDS_LIST = pytest.mark.skipif(
    not hasattr(TCPStore, "list_keys"), reason="this torch does not list the names in a store"
)
LISTEN = """
import json, os, psutil
from accelerate import Accelerator
accelerator = Accelerator()
accelerator.wait_for_everyone()
addresses = {
    each.laddr.ip
    for each in psutil.net_connections("tcp")
    if each.status == psutil.CONN_LISTEN and each.pid in (os.getpid(), os.getppid())
}
facts = {"addresses": sorted(addresses), "key": os.environ.get("ACCELERATE_RUN_KEY")}
with open(f"rank_{accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
accelerator.wait_for_everyone()
"""


def test_a_launch_on_one_machine_listens_on_the_loopback_and_passes_a_key(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LISTEN)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "script.py",
    ]
    ended = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first["addresses"] == second["addresses"] == ["127.0.0.1"]
    assert first["key"] == second["key"]
    assert len(first["key"]) == 64
    assert first["key"] not in ended.stdout + ended.stderr


def list_addresses() -> set[str]:
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    found = [each for each in psutil.net_connections("tcp") if each.pid == os.getpid()]
    accelerator.wait_for_everyone()
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_ranks_that_another_launcher_started_listen_on_the_loopback_too(run: Callable[..., Any]) -> None:
    assert run(list_addresses) == [{"127.0.0.1"}] * 2


class Harmful:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (f"ran_{os.getpid()}",)


def save_with_unsigned_values_in_the_store() -> list[str]:
    """Save checkpoints, while rank 1 writes pickles and forged values over all keys that ranks read."""
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state("first")
    accelerator.wait_for_everyone()
    environ = os.environ
    unsigned = TCPStore(
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    forged = [pickle.dumps((True, Harmful())), json.dumps({"result": "forged"}).encode(), b"0" * 64 + b"{}"]
    if accelerator.process_index == 1:
        prefixes = {
            key.partition("checkpoints/0/")[0] for key in unsigned.list_keys() if "checkpoints/0/" in key
        }
        for number, prefix, name in itertools.product(range(40), prefixes, ("decision", "0", "1")):
            unsigned.set(f"{prefix}checkpoints/0/0.1/{number}/{name}", forged[number % 3])
    accelerator.wait_for_everyone()
    accelerator.save_state("second")
    accelerator.load_state("second")
    weight = accelerator.unwrap_model(model).weight
    assert torch.equal(weight, accelerator.gather(weight.detach())[:2])
    return sorted(name for name in os.listdir() if not name.startswith("."))


@NEEDS_LIST
def test_unsigned_values_in_the_store_change_nothing(run: Callable[..., Any]) -> None:
    names = run(save_with_unsigned_values_in_the_store, env={KEY_VARIABLE: "secret"})
    assert [set(each) & {"first", "second"} for each in names] == [{"first", "second"}] * 2
    assert not [name for each in names for name in each if name.startswith("ran_")]


FORGED_REPORT = """
import sys
from dataclasses import asdict
from torch.distributed import PrefixStore, TCPStore
from accelerate.diagnostics import peers
from accelerate.diagnostics.hang_report import Report
from accelerate.state import StoreChannel
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
(introduced,) = [key for key in store.list_keys() if "accelerate/hangs/" in key and key.endswith("/who")]
prefix, purpose, rest = introduced.removesuffix("/who").partition("accelerate/hangs/")
store = PrefixStore(prefix.removesuffix("/"), store) if prefix else store
channel = StoreChannel(store, purpose + rest, {})  # signs as a run without a key does
channel.post("report/1", asdict(Report("end", 0, True, 2, [])))
channel.count("events", peers._ASKED + peers._REPORTED)
"""


def continue_after_a_forged_report() -> int:
    """Continue for some looks of the watcher while an unsigned report demands the end."""
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        program = [sys.executable, "-c", FORGED_REPORT, os.environ["MASTER_PORT"]]
        subprocess.run(program, check=True, timeout=60)
    accelerator.wait_for_everyone()
    time.sleep(2.5)
    accelerator.wait_for_everyone()
    return accelerator.process_index


@NEEDS_LIST
@pytest.mark.parametrize("key", ["secret", pytest.param(None, marks=pytest.mark.slow)])
def test_an_unsigned_report_ends_no_rank(run: Callable[..., Any], key: str | None) -> None:
    env = {KEY_VARIABLE: key, "ACCELERATE_HANG_ACTION": "abort"}
    assert run(continue_after_a_forged_report, env=env) == [0, 1]
