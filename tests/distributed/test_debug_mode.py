"""Mismatched collectives raise the same error on all ranks, from the command line to the exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.ops import DistributedOperationException, current_transport, gather, gather_object
from accelerate.state import PartialState, wait_for_everyone

Run = Callable[..., list[Any]]
SECONDS = 120
PATH = "accelerate.utils.operations"


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(DistributedOperationException) as error:
        call()
    return str(error.value).replace(__file__, "FILE")


def disagree() -> dict[str, str]:
    first = PartialState().is_main_process
    two, three = torch.ones(2), torch.ones(3)
    accelerator = Accelerator()
    return {
        "waiting": refused(lambda: wait_for_everyone() if first else gather(two)),
        "waiting of the accelerator": refused(
            lambda: accelerator.gather_for_metrics([1]) if first else accelerator.wait_for_everyone()
        ),
        "shapes": refused(lambda: accelerator.gather(two if first else three)),
        "lines": refused(lambda: gather(two) if first else gather(three)),
    }


def assert_disagreement(first: dict[str, str], second: dict[str, str]) -> None:
    assert first == second
    wait = "accelerate.utils.wait_for_everyone"
    assert f"Operation:\n  - Process 0: `{wait}`\n  - Process 1: `{PATH}.gather`\n" in first["waiting"]
    assert f"`{PATH}.gather_object`\n  - Process 1: `{wait}`\n" in first["waiting of the accelerator"]
    assert f"Operation: `{PATH}.gather`\nInput shapes:\n  - Process 0: [2]\n" in first["shapes"]
    lines = re.findall(r"- Process \d: FILE:(\d+)", first["lines"])
    assert len(lines) == 2


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_mismatch_is_the_same_error_on_all_ranks(run: Run, debug: str) -> None:
    assert_disagreement(*run(disagree, env={"ACCELERATE_DEBUG_MODE": debug}))


def call_without_a_header() -> tuple[dict[str, str], list[Any]]:
    """As with a transport for CPU tensors that has no header: calls are compared in debug mode only."""
    transport: Any = current_transport()
    transport.header, transport.verifies = None, False
    rank = torch.tensor([PartialState().process_index])
    plain = [gather(rank).tolist(), gather_object([1]), transport.header is None]
    PartialState().debug = True
    message = disagree()
    return message, [*plain, gather(rank).tolist(), gather_object([1])]


def test_transports_without_a_header_compare_in_debug_mode(run: Run) -> None:
    (first, calls), (second, _) = run(call_without_a_header)
    assert_disagreement(first, second)
    assert calls == [[0, 1], [1, 1], True, [0, 1], [1, 1]]


def agree_from_different_lines() -> list[list[int]]:
    rank = torch.tensor([PartialState().process_index])
    if PartialState().is_main_process:
        wait_for_everyone()
        return [gather(rank).tolist()]
    wait_for_everyone()
    return [gather(rank).tolist()]


def test_the_same_operation_from_different_lines_is_accepted(run: Run) -> None:
    assert run(agree_from_different_lines, env={"ACCELERATE_DEBUG_MODE": "1"}) == [[[0, 1]]] * 2


SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
width = 5 if accelerator.is_main_process else 6
accelerator.wait_for_everyone()
accelerator.gather(torch.ones(1, width))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["flag", "variable", "file"])
def test_a_launch_ends_with_the_message(tmp_path: Path, way: str) -> None:
    script, config = tmp_path / "train.py", tmp_path / "config.yaml"
    script.write_text(SCRIPT)
    config.write_text("debug: true\nuse_cpu: true\nnum_processes: 2\ndistributed_type: MULTI_CPU\n")
    words = {
        "flag": ["--debug", "--cpu", "--num_processes", "2"],
        "variable": ["--cpu", "--num_processes", "2"],
        "file": ["--config_file", str(config)],
    }[way]
    ended = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words, str(script)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env={
            **os.environ,
            **({"ACCELERATE_DEBUG_MODE": "1"} if way == "variable" else {}),
            "HF_HOME": str(tmp_path),
        },
        check=False,
    )
    assert ended.returncode != 0
    for line in (
        f"Operation: `{PATH}.gather`",
        "Input shapes:",
        "  - Process 0: [1, 5]",
        "  - Process 1: [1, 6]",
        f"  - Process 0: {script}:8",
    ):
        assert line in ended.stderr
