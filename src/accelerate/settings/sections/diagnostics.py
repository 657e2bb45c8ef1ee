"""When a run reports a hang, and when it is asked to stop or to save before its end."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import Section, option

HANG_ACTIONS = ("report", "abort")


@dataclass(frozen=True, kw_only=True)
class DiagnosticsSection(Section):
    """Hangs: after what time they are reported, and whether the run goes on."""

    title = "Diagnostics Arguments"
    env_prefix = "ACCELERATE_"

    hang_timeout: int | None = option(
        None,
        "Seconds that a process may wait for the others before a report says where each of them is (60); "
        "0 for no reports.",
        limits=(0, 10**6),
    )
    hang_action: str | None = option(
        None,
        "What follows a report: report (the default) lets the run go on, abort ends all processes with an "
        "error.",
        choices=HANG_ACTIONS,
    )


@dataclass(frozen=True, kw_only=True)
class StoppingSection(Section):
    """What `accelerator.should_stop` and `accelerator.should_save` watch beside signals."""

    title = "Stopping Arguments"
    env_prefix = "ACCELERATE_"

    max_time: str | None = option(
        None,
        "Time after its start when a process is asked to save and stop: seconds, HH:MM:SS or D-HH:MM:SS.",
    )
    stop_margin: int | None = option(
        None,
        "Seconds before the end of an allocation of SLURM when processes are asked to save and stop (120); "
        "0 leaves that to signals.",
        limits=(0, 10**6),
    )
    stop_file: str | None = option(
        None, "A file that asks all processes to save and stop as soon as it exists."
    )
    save_file: str | None = option(
        None, "A file that asks all processes to save and go on, each time that it is touched."
    )
