"""The profiler that the arguments build."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from accelerate.base import ConfigurationError
from accelerate.plugins import ProfileKwargs

CYCLES = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}


@pytest.fixture(autouse=True)
def _inductor_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch sets this variable itself when it is not set, which would be a leak of the test.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "torchinductor_tests")))


def work(profiler: Any, steps: int) -> None:
    with profiler:
        for _ in range(steps):
            torch.ones(8, 8).mm(torch.ones(8, 8))
            profiler.step()


def names(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_the_arguments_reach_the_profiler() -> None:
    profiler = ProfileKwargs(activities=["cpu"], record_shapes=True, with_modules=True).build()
    assert profiler.activities == {ProfilerActivity.CPU}
    assert profiler.record_shapes
    assert profiler.with_modules
    assert not profiler.profile_memory


def test_everything_the_machine_has_is_recorded_by_default() -> None:
    assert ProfileKwargs().build().activities == torch.profiler.supported_activities()


def test_a_trace_is_written_when_the_profiler_stops(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    work(ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder)).build(), steps=1)
    assert [path.name for path in folder.iterdir()] == ["profile_0.json"]
    assert "aten::mm" in names(folder / "profile_0.json")


# torch says so at every second cycle; as an error inside step() it makes torch crash.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")
def test_each_cycle_has_a_trace_and_a_call(tmp_path: Path) -> None:
    seen: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option=CYCLES,
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
        output_trace_dir=str(tmp_path),
    )
    work(handler.build(), steps=10)
    assert seen == [4, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_0_cycle2.json"]


def test_a_trace_that_the_user_has_exported_is_not_written_again(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    handler = ProfileKwargs(
        activities=["cpu"],
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(mine)),
        output_trace_dir=str(tmp_path),
    )
    with pytest.warns(UserWarning, match=r"profile_0.json was not written: Trace is already saved"):
        work(handler.build(), steps=1)
    assert mine.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"activities": ["gpu"]},
        {"schedule_option": {"wait": 1, "warmup": 1}},
        {"schedule_option": {"wait": 1, "warmup": 1, "active": 0}},
        {"schedule_option": {"wait": 1, "warmup": 1, "active": 1, "pause": 3}},
    ],
)
def test_unknown_profiler_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        ProfileKwargs(**wrong)


def test_a_folder_that_cannot_be_made_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "file")).build()
    with pytest.warns(UserWarning, match="was not written.*Name another output_trace_dir"), profiler:
        torch.ones(2).sum()


@pytest.mark.parametrize("wrong", [{"activities": "cpu"}, {"schedule_option": [1]}])
def test_one_value_in_place_of_several(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="needed"):
        ProfileKwargs(**wrong)
