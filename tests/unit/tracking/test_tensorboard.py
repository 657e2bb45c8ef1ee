"""The calls of the SummaryWriter."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate.base import Package
from accelerate.state import PartialState
from accelerate.tracking import TensorBoardTracker, runs


class SummaryWriter:
    """Keeps the calls that it gets."""

    def __init__(self, logging_dir: str, **kwargs: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [("open", (logging_dir,), kwargs)]

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.fixture(autouse=True)
def _writer(states: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "tensorboard", "torch.utils.tensorboard")
    PartialState(cpu=True)


def install(monkeypatch: pytest.MonkeyPatch, package: str, home: str) -> None:
    """Let one package look installed, with the writer of this file."""
    installed = {name: Package(name, (name,)) for name in ("tensorboard", "tensorboardX")}
    monkeypatch.setattr(Package, "available", lambda self: self.module == package)
    monkeypatch.setattr(Package, "version", lambda self: None)
    monkeypatch.setattr(runs, "PACKAGES", installed)
    module = types.ModuleType(home)
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home, module)


def started(folder: Path, **kwargs: Any) -> TensorBoardTracker:
    tracker = TensorBoardTracker("run", str(folder), **kwargs)
    tracker.start()
    return tracker


def calls(tracker: TensorBoardTracker) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    return [call for call in tracker.tracker.calls if call[0] != "flush"]


def test_tensorboard_x_is_used_where_only_that_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "tensorboardX", "tensorboardX")
    assert isinstance(started(tmp_path).tracker, SummaryWriter)


def test_values_are_written_by_their_type(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log(
        {"loss": torch.tensor(0.5), "epoch": 3, "note": "warm", "both": {"a": 1.0, "b": 2.0}},
        step=7,
        walltime=1.0,
    )
    extra = {"global_step": 7, "walltime": 1.0}
    assert calls(tracker)[1:] == [
        ("add_scalar", ("loss", 0.5), extra),
        ("add_scalar", ("epoch", 3.0), extra),
        ("add_text", ("note", "warm"), extra),
        ("add_scalars", ("both", {"a": 1.0, "b": 2.0}), extra),
    ]
    assert tracker.tracker.calls[-1][0] == "flush"


def test_values_that_cannot_be_plotted_give_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = started(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tracker.log({"weights": [1, 2], "loss": 1})
    assert [call[0] for call in calls(tracker)[1:]] == ["add_scalar", "add_scalar"]
    assert caplog.text.count("does not log 'weights': a list") == 1


def test_hyperparameters_are_kept_twice(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    values = {"lr": np.float64(0.1), "name": np.str_("x"), "layers": [1, 2], "seed": None}
    tracker.store_init_configuration(values)
    assert calls(tracker)[1:] == [
        ("add_hparams", ({"lr": 0.1, "name": "x", "layers": "[1, 2]", "seed": "None"},), {"metric_dict": {}})
    ]
    (stored,) = tmp_path.glob("run/*/hparams.yml")
    assert stored.read_text() == "layers: '[1, 2]'\nlr: 0.1\nname: x\nseed: null\n"
    assert float(stored.parent.name) > 0


def test_images_are_kept(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log_images({"digits": "pixels"}, step=1, dataformats="NHWC")
    assert calls(tracker)[1:] == [
        ("add_images", ("digits", "pixels"), {"global_step": 1, "dataformats": "NHWC"})
    ]
