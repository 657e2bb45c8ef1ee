"""The runs of `accelerate test --resume`, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accelerate.checkpointing import GeneratorsPart, no_change
from accelerate.commands.test import RUNS, compare
from accelerate.test_utils.scripts import test_resume as script

pytestmark = [
    pytest.mark.usefixtures("states"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it in its constructor
]


def record(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[object]]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for run in RUNS:
        monkeypatch.setattr(sys, "argv", ["script", run, str(folder)])
        script.main()
    return [[json.loads((folder / f"{run}_0.json").read_text())] for run in RUNS]


def test_every_case_resumes_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "CASES", [case for case in script.CASES if not case.workers])
    monkeypatch.setattr(script, "EPOCHS", 2)
    verdicts = compare(*record(monkeypatch, tmp_path))
    assert [each.name for each in verdicts if not each.is_same] == []
    assert {each.batches for each in verdicts} == {20}
    assert not (tmp_path / "checkpoints").exists()


def test_a_generator_that_is_not_restored_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "CASES", script.CASES[:1])
    monkeypatch.setattr(script, "EPOCHS", 2)
    monkeypatch.setattr(GeneratorsPart, "change", lambda self, apply: no_change)
    (verdict,) = compare(*record(monkeypatch, tmp_path))
    assert verdict.weights != "same"
