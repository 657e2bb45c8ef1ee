"""Runs of `accelerate launch`: collectives, DistributedDataParallel and FSDP 2."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from .setting import NotAvailableError, Setting


def launch(setting: Setting, case: str, processes: int = 1) -> list[dict[str, Any]]:
    """Start the worker by `accelerate launch`; return what each rank wrote."""
    flags = ["--num_processes", str(processes), "--num_machines", "1", "--main_process_port", "0"]
    if setting.is_host:
        flags.append("--cpu")
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags]
    return start(setting, launcher, case, processes)


def torchrun(setting: Setting, case: str, processes: int) -> list[dict[str, Any]]:
    """Start the worker by torchrun, which takes more processes than there are devices, over gloo."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    meeting = ["--nnodes", "1", "--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc_per_node", str(processes)]
    return start(setting, launcher, case, processes, "gloo")


def start(
    setting: Setting, launcher: list[str], case: str, processes: int, backend: str = ""
) -> list[dict[str, Any]]:
    folder = setting.folder / case
    folder.mkdir()
    request = {
        "case": case,
        "device": setting.device,
        "folder": str(folder),
        "imports": setting.imports,
        "backend": backend,
    }
    code = subprocess.run(
        [*launcher, "-m", "gpu_acceptance.worker", json.dumps(request)], check=False
    ).returncode
    if code:
        raise RuntimeError(f"the run of {case} on {processes} ranks ended with exit code {code}")
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


def communication_of(setting: Setting) -> str:
    """Return the library that connects processes of this device."""
    import torch.distributed as dist

    name = setting.backend.comm
    if name is None or not dist.is_backend_available(name):
        raise NotAvailableError(f"this build of torch has no {name or 'communication'} for {setting.device}")
    return str(name)


def run_collectives_on_one_rank(setting: Setting) -> None:
    """Open a group of one rank over the device's own library, and run every operation of the transport."""
    backend = communication_of(setting)
    (row,) = launch(setting, "transport")
    assert row["backend"] == backend, row
    setting.report("operations over a group of one rank", row["operations"], "")


def run_on_all_devices(setting: Setting) -> None:
    """Train with DistributedDataParallel and FSDP 2 on all devices, beside one process."""
    backend = communication_of(setting)
    count = 2 if setting.is_host else setting.backend.count()
    if count < 2:
        raise NotAvailableError(f"this machine has one device of type {setting.device}")
    for case in ("operations", "ddp", "fsdp2", "matrices"):
        check_ranks(setting, case, launch(setting, case, count), backend)
    setting.report("ranks", count, "")


def run_ranks_on_one_device(setting: Setting) -> None:
    """Let two ranks share the first device over gloo: several ranks without a second device."""
    import torch.distributed as dist

    if setting.device not in dist.Backend.backend_capability["gloo"]:
        raise NotAvailableError(f"gloo does not take tensors of {setting.device}")
    for case in ("operations", "ddp", "matrices"):
        check_ranks(setting, case, torchrun(setting, case, 2), "gloo")
    setting.report("ranks", 2, "")


def check_ranks(setting: Setting, case: str, rows: list[dict[str, Any]], backend: str) -> None:
    assert [row["processes"] for row in rows] == [len(rows)] * len(rows), rows
    assert all(row["backend"] == backend for row in rows), rows
    if "losses" in rows[0]:
        compare(setting, case, rows)


def train_ddp(setting: Setting) -> None:
    """Train one rank under DistributedDataParallel; its losses are those of the plain model."""
    communication_of(setting)
    compare(setting, "ddp", launch(setting, "ddp_one"))


def train_fsdp2(setting: Setting) -> None:
    """Train one rank under FSDP 2; its losses are those of the plain model."""
    communication_of(setting)
    compare(setting, "fsdp2", launch(setting, "fsdp2_one"))


def compare(setting: Setting, case: str, rows: list[dict[str, Any]]) -> None:
    """Compare the losses that all ranks report with those of a plain loop over the same rows."""
    for row in rows:
        differences = [abs(a - b) / abs(b) for a, b in zip(row["losses"], row["plain"], strict=True)]
        assert max(differences) < 1e-4, f"{case}: {row['losses']} instead of {row['plain']}"
    setting.report(f"{case}: largest relative difference of a loss", max(differences), "")
