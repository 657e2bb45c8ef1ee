"""The bar of a long task: on a terminal, on rank 0, after a while; and what it counts."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.base import advance, expect, for_threads, is_shown, progress
from accelerate.checkpointing import shards
from accelerate.commands.checkpoint import checkpoint_command_parser


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def wait_for(self, text: str) -> str:
        """Return what was drawn, as soon as it has this text: rich draws in a thread."""
        end = time.monotonic() + 30
        while text not in (shown := re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())):
            assert time.monotonic() < end, shown
            time.sleep(0.01)
        return shown


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return terminal


def test_a_long_task_is_drawn_with_its_bytes(terminal: Terminal) -> None:
    with progress.progress_bar("Reading", 3_000_000):
        assert is_shown()
        advance(1_000_000)
        assert "Reading" in terminal.wait_for("33%")
        with progress.progress_bar("a task inside", 1_000_000):
            advance(1_000_000)
        assert "a task inside" not in terminal.wait_for("50%")
        with ThreadPoolExecutor(2, **for_threads()) as pool:
            list(pool.map(advance, [500_000] * 4))
        terminal.wait_for("100%")
    assert not is_shown()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_other_threads_do_not_update_the_progress_bar(terminal: Terminal) -> None:
    with progress.progress_bar("Reading", 10), ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_shown).result() is False


def test_a_short_task_draws_no_progress_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 60.0)
    with progress.progress_bar("Reading", 10):
        advance(10)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("case", ["pipe", "another rank", "no stream"])
def test_without_a_terminal_on_this_rank_no_progress_is_counted(
    case: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "another rank":
        monkeypatch.setenv("RANK", "1")
    else:
        stream = io.StringIO() if case == "pipe" else None
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    with progress.progress_bar("Reading", 10):
        assert not is_shown()
        advance(10)
        expect(10)
    assert terminal.getvalue() == ""


def test_a_terminal_that_cannot_erase_a_line_gets_none(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with progress.progress_bar("Reading", 10):
        advance(10)
        time.sleep(0.1)
    assert terminal.getvalue() == ""


@pytest.fixture
def bars(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The bytes that each task has done, and those of the whole, when it ends."""
    found: dict[str, list[int]] = {}
    end = progress.Bar.__exit__

    def note(bar: progress.Bar, *exception: object) -> None:
        found[bar._task] = [bar.done, bar.total]
        end(bar, *exception)

    monkeypatch.setattr(progress.Bar, "__exit__", note)
    monkeypatch.setattr(progress, "DELAY", 60.0)
    return found


@pytest.mark.usefixtures("states")
def test_saving_loading_and_verifying_count_their_bytes(tmp_path: Path, bars: dict[str, list[int]]) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(40, 40))
    accelerator.save_model(model, tmp_path / "weights", max_shard_size="2KB")
    assert len(os.listdir(tmp_path / "weights")) > 1
    folder = accelerator.save_state(tmp_path / "one")
    size = sum(each.nbytes for each in model.parameters())
    accelerator.load_state(folder)
    arguments = checkpoint_command_parser().parse_args(["verify", str(folder)])
    arguments.func(arguments)
    assert bars["Saving a model"][1] == size
    assert bars["Saving one"][1] == 2 * (size + torch.get_rng_state().nbytes)
    assert size < bars["Saving a model"][0] < size + 1000  # headers of files come on top
    for task in ("Loading a checkpoint", "Verifying"):
        done, total = bars[task]
        assert done == total > size


@pytest.mark.usefixtures("states")
def test_a_file_that_grows_moves_the_bar(tmp_path: Path, terminal: Terminal) -> None:
    path = tmp_path / "file"
    with progress.progress_bar("Saving", 2_000_000, lambda: progress.size_of([path])):
        terminal.wait_for("0%")
        path.write_bytes(bytes(500_000))
        terminal.wait_for("25%")
        path.write_bytes(bytes(1_000_000))
        terminal.wait_for("50%")
        advance(1_000_000)
        terminal.wait_for("100%")


def test_a_sparse_file_counts_its_written_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 20)
        assert progress.size_of(tmp_path.iterdir()) < 1 << 20
        file.write(bytes([1]) * (1 << 20))
        file.flush()
        os.fsync(file.fileno())
    assert progress.size_of(tmp_path.iterdir()) == 1 << 20


@pytest.mark.usefixtures("states")
def test_saving_a_model_counts_the_file_that_safetensors_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[Callable[[], int]] = []
    seen: list[int] = []

    def bar(task: str, nbytes: int, written: Callable[[], int]) -> nullcontext[None]:
        counts.append(written)
        return nullcontext()

    def write(content: object, tied: object, path: Path) -> None:
        part = path.with_name(".tmpAbC")
        seen.append(counts[0]())
        part.write_bytes(bytes([1]) * 5000)
        seen.append(counts[0]())
        part.rename(path)

    (tmp_path / "present").write_bytes(bytes([1]) * 3000)
    monkeypatch.setattr(shards, "progress_bar", bar)
    monkeypatch.setattr(shards, "write_whole_tensors", write)
    Accelerator(cpu=True).save_model(nn.Linear(2, 2), tmp_path)
    assert seen == [0, 5000]


@pytest.mark.usefixtures("states")
def test_loading_weights_counts_their_files(tmp_path: Path, terminal: Terminal) -> None:
    model = nn.Linear(40, 40)
    Accelerator(cpu=True).save_model(model, tmp_path)
    with progress.progress_bar("outer"):
        load_checkpoint_in_model(model, tmp_path)
        bar = progress._shown.get()
        assert bar is not None
        size = (tmp_path / "model.safetensors").stat().st_size
        assert (bar.done, bar.total) == (sum(each.nbytes for each in model.parameters()), size)
