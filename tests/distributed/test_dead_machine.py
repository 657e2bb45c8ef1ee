"""Ranks of several nodes do not wait in the store for a rank whose process or machine has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import StateError
from accelerate.state import Connections, agreement, services
from accelerate.utils import ProjectConfiguration

NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": None}  # one rank on each


def save_without(killed: int, folder: str) -> None:
    """Saves after a rank was killed."""
    agreement.MAX_WAIT = 1.0
    accelerator = Accelerator(project_config=ProjectConfiguration(folder))
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(f"{folder}/first")
    if accelerator.process_index == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StateError, match=f"process {killed} of another node has ended"):
        accelerator.save_state(f"{folder}/second")


def test_a_save_does_not_wait_for_a_rank_of_another_node_that_was_killed(
    end: Callable[..., Any], tmp_path: Path
) -> None:
    ended = end(save_without, 2, str(tmp_path), processes=3, env=NODES)
    assert ended.codes == [0, 0, -signal.SIGKILL], ended.outputs


def save_late(folder: str) -> list[int]:
    """Saves on one rank after the first request of the others to the store."""
    agreement.MAX_WAIT = 1.0
    accelerator = Accelerator(project_config=ProjectConfiguration(folder))
    accelerator.prepare(torch.nn.Linear(2, 2))
    if accelerator.process_index == 1:
        time.sleep(agreement.MAX_WAIT + 1)
    accelerator.save_state(f"{folder}/late")
    connections = services.find(Connections)
    assert connections is not None
    return list(connections.ended())


def test_a_save_waits_for_a_late_rank_of_another_node(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run(save_late, str(tmp_path), processes=2, env=NODES) == [[], []]
    assert (tmp_path / "late").exists()
