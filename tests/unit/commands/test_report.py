"""`accelerate report`: where the page is written, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.checkpointing import Manifest
from accelerate.commands.report import report_command, report_command_parser
from accelerate.monitoring import RecordWriter, Start, Window

from ..report.recorded_run import write_run


def report(*words: str | Path) -> None:
    report_command(report_command_parser().parse_args([str(word) for word in words]))


def test_the_page_of_a_run_is_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    report(tmp_path / "run")
    out = capsys.readouterr().out
    state, mesh, _, last, goodput, interval, conclusion, written = out.splitlines()
    assert (mesh, last) == ("  mesh: dp_shard 2", "  rank 1 = dp_shard 1")
    assert state == "run: A rank failed."
    assert goodput.startswith("  goodput ")
    assert interval.startswith("  1 failure suggests a save every ")
    assert conclusion == "  straggler (step 250): rank 1 is 33 % slower since step 100"
    assert written.startswith(f"Written to {tmp_path / 'run' / 'report.html'} (")
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def write_mesh(folder: Path, world_size: int, mesh: dict[str, Any]) -> None:
    for rank in range(world_size):
        writer = RecordWriter(folder / "run_records", rank)
        writer.write(Start(time=1.0, rank=rank, world_size=world_size, pid=1, mesh=mesh))
        writer.write(Window(time=2.0, first=1, last=2, seconds=1.0, seconds_by={}))
        writer.close()


def test_the_mesh_of_a_run_is_shown_with_the_position_of_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mesh(tmp_path / "run", 4, {"pp": 2, "dp_replicate": 1, "dp_shard": 2})
    report(tmp_path / "run")
    _, *lines, _ = capsys.readouterr().out.splitlines()
    assert lines == [
        "  mesh: pp 2 x dp_shard 2",
        "  rank 0 = pp 0, dp_shard 0",
        "  rank 1 = pp 0, dp_shard 1",
        "  rank 2 = pp 1, dp_shard 0",
        "  rank 3 = pp 1, dp_shard 1",
        "  goodput 100.0% of 1.0 s: steps 100.0%",
    ]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "4 ranks; mesh pp 2 x dp_shard 2; step 2" in page
    assert page.count("pp 1, dp_shard 0") == 1
    report(tmp_path / "run", "--json")
    (summary,) = json.loads(capsys.readouterr().out)
    assert summary["mesh"] == {"pp": 2, "dp_shard": 2}
    assert [rank["position"] for rank in summary["ranks"]][2] == "pp 1, dp_shard 0"


def test_a_large_mesh_names_the_first_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mesh(tmp_path / "run", 16, {"dp_shard": 8, "tp": 2})
    report(tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert lines[9:11] == ["  rank 7 = dp_shard 3, tp 1", "  and 8 more ranks"]


@pytest.mark.parametrize(
    "mesh", [{}, {"pp": 0}, {"pp": -2, "tp": -1}, {"pp": 3}, {"pp": "2"}, {"pp": 2.0}, {"pp": True, "tp": 2}]
)
def test_records_without_the_sizes_of_a_mesh_have_no_positions(
    mesh: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mesh(tmp_path / "run", 2, mesh)
    report(tmp_path / "run")
    assert "mesh" not in capsys.readouterr().out
    assert "in the mesh" not in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_no_text_of_a_run_controls_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", text="\x1b[2J\x9b")
    report(tmp_path / "run")
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_the_page_of_several_runs_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "b/run"):
        write_run(tmp_path / name)
    report("a/run", "b/run")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>a/run and b/run</title>" in page


def test_a_file_can_be_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    report(tmp_path / "run", "--output", tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "run" / "report.html").exists()


def test_checkpoints_of_the_folder_are_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path)
    stored = tmp_path / "checkpoints" / "checkpoint_4"
    stored.mkdir(parents=True)
    Manifest({}, world_size=2, step=7).write(stored)
    report(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>checkpoints/checkpoint_4</td>" in page
    assert "<td>complete</td>" in page


def test_the_summary_is_printed_as_json_and_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    report(tmp_path / "run", "--json")
    (summary,) = json.loads(capsys.readouterr().out)
    assert summary["name"] == "run"
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_target_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"missing/page.html cannot be written: .* --output"):
        report(tmp_path / "run", "--output", tmp_path / "missing" / "page.html")


def test_more_runs_than_colors_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at most 8 runs are compared"):
        report(*[tmp_path] * 9)


def test_a_folder_without_records_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it has no records"):
        report(tmp_path)


def test_the_folder_may_be_a_relative_path_with_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    stored = tmp_path / "run" / "checkpoint_4"
    stored.mkdir()
    Manifest({}, world_size=2, step=7).write(stored)
    (tmp_path / "run" / "logs").mkdir()
    monkeypatch.chdir(tmp_path / "run" / "logs")
    report("..")
    assert capsys.readouterr().out.startswith("run: ")
    assert "<td>checkpoint_4</td>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
