"""How far a run was is read with the kinds that it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.checkpointing import Load, Progress, read_progress


def source(step: Any = 3, run: Any = None) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(step=step, run={} if run is None else run))


def test_what_the_manifest_says_is_taken(tmp_path: Path) -> None:
    run = {"sync_gradients": False, "num_steps": 2, "updates": [4, 5], "gradient_order": [[1, 0], []]}
    assert read_progress(source(3, run), Load(tmp_path)) == Progress(3, False, [4, 5], [[1, 0], []])
    assert read_progress(source(), Load(tmp_path)) == Progress(3, True)


@pytest.mark.parametrize(("content", "step"), [({"step": 4}, 4), ({"step": "4"}, None), ([1], None)])
def test_other_software_may_say_the_step(tmp_path: Path, content: Any, step: int | None) -> None:
    torch.save(content, tmp_path / "random_states_0.pkl")
    other: Any = SimpleNamespace(manifest=None)
    assert read_progress(other, Load(tmp_path)) == Progress(step)
    assert read_progress(other, Load(tmp_path / "none")) == Progress()
