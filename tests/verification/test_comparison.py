"""Differences between the records of two runs, and their causes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accelerate.commands import verify
from accelerate.commands.verify import without_own
from accelerate.verification import TOLERANCES, Finding, Run, Step, compare, tolerances_of


def step(loss: float = 1.0, norm: float = 2.0, rate: float = 0.1, rows: str = "0123", **more: Any) -> Step:
    half = len(rows) // 2
    samples = {0: [f"0/0/{row}" for row in rows[:half]], 1: [f"0/0/{row}" for row in rows[half:]]}
    values: dict[str, Any] = {"norms": [norm, norm], "positions": [], "contents": {}, "samples": samples}
    values |= {"rates_of_ranks": [[rate], [rate]], "settings": [{"betas": [0.9, 0.8]}], **more}
    return Step(loss, rates=[rate], by_index=True, **values)


def run_of(folder: Path, *steps: Step, **more: Any) -> Run:
    return Run(folder, 2, 2, steps={(0, n): each for n, each in enumerate(steps, 1)}, **more)


def find(folder: Path, changed: Step, **more: Any) -> list[Finding]:
    """Returns the differences of a run whose second step is changed."""
    own, reference = run_of(folder, step(), changed, **more), run_of(folder, step(), step())
    return compare(own, reference, TOLERANCES["no"])


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    assert find(tmp_path, step()) == []
    assert find(tmp_path, step(rows="3012")) == []  # the ranks may divide the samples in any way


@pytest.mark.parametrize(
    ("changed", "what", "text"),
    [
        (step(loss=1.01), "loss", "the loss is 1.01, and 1 in the reference"),
        (step(loss=float("nan")), "loss", "the loss is nan"),
        (step(loss=0.5), "loss", "1/2 of that"),
        (step(norm=4.0), "gradient norm", "2 times"),
        (step(norms=[2.0, 2.5]), "gradient norm", "2.5 on rank 1"),
        (step(norms=[2.0, float("nan")]), "gradient norm", "nan on rank 1"),
        (step(norms=[2.0, float("inf")]), "gradient norm", "inf on rank 1"),
        (step(rate=0.2), "learning rate", "0.2, and 0.1"),
        (step(rates_of_ranks=[[0.1], [0.2]]), "learning rate", "0.1 on rank 0, 0.2 on rank 1"),
        (
            step(settings=[{"betas": [0.9, 0.9]}]),
            "settings",
            "betas of the optimizer is [0.9, 0.9], and [0.9, 0.8]",
        ),
        (step(settings=[{"betas": []}]), "settings", "betas of the optimizer is [], and [0.9, 0.8]"),
        (step(settings=[{"betas": [0.9, float("inf")]}]), "settings", "[0.9, inf], and [0.9, 0.8]"),
        (step(loss=0.5, samples={0: [], 1: []}), "samples", "No batch of a prepared loader"),
        (step(rows="0122"), "samples", "rank 1 read samples 2 again, and samples 3 were not read"),
        (step(rows="01"), "samples", "2 samples, and 4 in the reference"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changed: Step, what: str, text: str) -> None:
    (finding,) = find(tmp_path, changed)
    assert (finding.step, finding.what) == (2, what)
    assert text in f"{finding.text} {finding.cause}"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_equal_values_that_are_not_finite_are_no_difference(tmp_path: Path, value: str) -> None:
    first = step(loss=float(value), norm=float(value), settings=[{"max_norm": float(value)}])
    run = run_of(tmp_path, first, step())
    assert compare(run, run, TOLERANCES["no"]) == []
    (finding,) = compare(run_of(tmp_path, first, step(loss=1.01)), run, TOLERANCES["no"])
    assert finding.text == "the loss is 1.01, and 1 in the reference"


def test_a_rounded_schedule_is_expected(tmp_path: Path) -> None:
    own = run_of(tmp_path, step(), step(rate=0.105, positions=[4]))
    reference = run_of(tmp_path, step(), step(rate=0.1, positions=[2]))
    (finding,) = compare(own, reference, TOLERANCES["no"])
    assert finding.is_expected
    own.steps[0, 2] = replace(own.steps[0, 2], rates=[0.2])
    (finding,) = compare(own, reference, TOLERANCES["no"])
    assert not finding.is_expected
    assert "2 steps for each step" in finding.cause


def test_batch_normalization_is_mentioned(tmp_path: Path) -> None:
    (finding,) = find(tmp_path, step(), batch_norms=["norm"])
    assert finding.is_expected
    assert finding.text == "`norm` normalizes over the batch of each rank, 1/2 of the batch of a step"


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ({"weight": 2.0, "frozen": 0.0}, ""),
        ({"weight": 2.001, "frozen": 0.0}, ""),
        ({"weight": 2.5, "frozen": 0.0}, "the update of `weight` differs by 0.25 of it"),
        ({"weight": 2.0, "frozen": 1.0}, "`frozen` was trained, and is not in the reference"),
        ({"weight": 2.0}, "only one of the runs has frozen"),
    ],
)
def test_updates_are_compared(tmp_path: Path, after: dict[str, float], text: str) -> None:
    def write(folder: Path, moment: str, values: dict[str, float]) -> None:
        folder.mkdir(exist_ok=True)
        tensors = {name: torch.full((3,), value) for name, value in values.items()}
        save_file(tensors, folder / f"{moment}-0.safetensors")

    for name, values in (("own", after), ("reference", {"weight": 2.0, "frozen": 0.0})):
        write(tmp_path / name, "before", {"weight": 0.0, "frozen": 0.0})
        write(tmp_path / name, "after", values)
    own, reference = run_of(tmp_path / "own", step()), run_of(tmp_path / "reference", step())
    assert "".join(finding.text for finding in compare(own, reference, TOLERANCES["no"])) == text


def test_updates_of_buffers_of_other_dtypes_are_compared(tmp_path: Path) -> None:
    values = {"mask": torch.ones(3, dtype=torch.bool), "count": torch.tensor(5, dtype=torch.uint8)}
    for name in ("own", "reference"):
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "before-0.safetensors")
        counted = {"mask": values["mask"].logical_not(), "count": values["count"] - 2}
        save_file(counted, tmp_path / name / "after-0.safetensors")
    own, reference = run_of(tmp_path / "own", step()), run_of(tmp_path / "reference", step())
    assert compare(own, reference, TOLERANCES["no"]) == []
    save_file(values, tmp_path / "own" / "after-0.safetensors")
    (finding,) = compare(own, reference, TOLERANCES["no"])
    assert finding.text == "the update of `count` differs by 1 of it, and 1 more"


def test_tolerances_follow_the_precision(tmp_path: Path) -> None:
    run = run_of(tmp_path, step(), precision="bf16")
    assert tolerances_of(run) == TOLERANCES["bf16"]
    assert tolerances_of(run, 2.0).loss == 2 * TOLERANCES["bf16"].loss


def test_the_json_of_a_loss_that_is_nan_is_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, step(loss=float("nan")))
    monkeypatch.setattr(verify, "_run_both", lambda *args: (run, run))
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    script, result = tmp_path / "train.py", tmp_path / "result.json"
    script.touch()
    verify.verify_command(
        verify.verify_command_parser().parse_args(["--cpu", "--json", str(result), str(script)])
    )
    content = json.loads(result.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["launch"]["steps"][0]["loss"] == "nan"


def test_flags_of_the_launch_are_passed_on() -> None:
    words = ["--steps", "3", "--cpu", "--json=x", "--keep-dropout", "--num_processes", "2"]
    assert without_own(words) == ["--cpu", "--num_processes", "2"]
