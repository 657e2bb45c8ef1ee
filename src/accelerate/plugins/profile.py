"""Arguments of the torch profiler, and the profiler that they build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelerate.base import PROFILE_PATTERN_NAME, wrong_value
from accelerate.plugins.checks import at_least, one_of
from accelerate.plugins.handlers import KwargsHandler

if TYPE_CHECKING:
    import torch
    import torch.profiler

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]

_ACTIVITIES: dict[str, str] = {name.lower(): name for name in ("CPU", "XPU", "MTIA", "CUDA", "HPU")}
_PHASES = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0, "skip_first_wait": 0}
_REQUIRED_PHASES = ("wait", "warmup", "active")


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `Accelerator.profile` records, when, and where it puts it.

    Args:
        activities: What is recorded: "cpu", "cuda", "xpu", "mtia", "hpu"; None is all that this machine has.
        schedule_option: Number of steps of each phase: `wait`, `warmup` and `active`, and if wanted `repeat`
            cycles of them and `skip_first`; None records everything.
        on_trace_ready: Called with the profiler at the end of each cycle.
        record_shapes: Whether the shapes of inputs are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether the line of source code is recorded.
        with_flops: Whether floating point operations are estimated.
        with_modules: Whether the module is recorded.
        output_trace_dir: Folder in which each process writes `profile_RANK.json`, and for later cycles
            `profile_RANK_cycle2.json` and so on, to be opened with chrome://tracing; None writes nothing.

    Raises:
        ConfigurationError: An unknown activity or phase, or a phase without a length.
    """

    activities: list[ProfilerActivity] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activities, str):
            raise wrong_value("activities", self.activities, "names in a list are needed", 'write ["cpu"]')
        for activity in self.activities or ():
            one_of("activities", activity, _ACTIVITIES)
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self) -> torch.profiler.profile:
        """Return the profiler, not started. Called on each rank that profiles."""
        import torch.profiler

        return torch.profiler.profile(
            activities=[self._get_profiler_activity(name) for name in self.activities or ()] or None,
            schedule=torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self._trace_callback(),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _get_profiler_activity(self, activity: ProfilerActivity) -> torch.profiler.ProfilerActivity:
        """Return torch's member for the name of an activity; an error where this torch has none."""
        import torch.profiler

        member = getattr(torch.profiler.ProfilerActivity, _ACTIVITIES.get(activity, ""), None)
        if member is None:
            fix = f"Choose one of {', '.join(_ACTIVITIES)}"
            raise wrong_value("activities", activity, "it is not a known choice", fix)
        return member  # type: ignore[no-any-return]

    def _trace_callback(self) -> Callable[[Any], None] | None:
        callback = self.on_trace_ready
        if self.output_trace_dir is None:
            return callback
        export = _TraceExport(Path(self.output_trace_dir))

        def call_both(profiler: Any) -> None:
            if callback is not None:
                callback(profiler)
            export(profiler)

        return call_both


class _TraceExport:
    """Writes the trace of each cycle to a file of its own, in a folder that is made for the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cycle = 0

    def __call__(self, profiler: Any) -> None:
        import torch.distributed as dist

        self._cycle += 1
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        suffix = f"{rank}_cycle{self._cycle}" if self._cycle > 1 else str(rank)
        path = self._folder / PROFILE_PATTERN_NAME.format(suffix=suffix)
        try:  # a profile must not end a training
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            warnings.warn(f"{path} was not written: {error}. Name another output_trace_dir.", stacklevel=2)
        except RuntimeError as error:  # torch saves a trace once only
            warnings.warn(
                f"{path} was not written: {error} "
                "Export traces either in on_trace_ready or by output_trace_dir.",
                stacklevel=2,
            )


def _check_schedule(schedule: dict[str, int]) -> None:
    fix = 'write {"wait": 1, "warmup": 1, "active": 3}'
    if not isinstance(schedule, dict):
        raise wrong_value("schedule_option", schedule, "steps by phase are needed", fix)
    unknown = [name for name in schedule if name not in _PHASES]
    if unknown:
        fix = f"Choose one of {', '.join(_PHASES)}"
        raise wrong_value("schedule_option", unknown[0], "it is not a known choice", fix, TypeError)
    missing = [name for name in _REQUIRED_PHASES if name not in schedule]
    if missing:
        reason, fix = f"it lacks {', '.join(missing)}", "Give wait, warmup and active"
        raise wrong_value("schedule_option", schedule, reason, fix, TypeError)
    for name, length in schedule.items():
        at_least(f"schedule_option[{name!r}]", length, _PHASES[name])
