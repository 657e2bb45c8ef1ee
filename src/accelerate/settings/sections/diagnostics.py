"""Hang detection: after what time it reports, and what it does."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.settings.option import Section, option

HANG_ACTIONS = ("report", "abort")


@dataclass(frozen=True, kw_only=True)
class DiagnosticsSection(Section):
    """Hangs: after what time they are reported, and whether the run goes on."""

    title = "Diagnostics Arguments"

    hang_timeout: int | None = option(
        None,
        "Seconds that a process may wait for the others before a report says where each of them is (60); "
        "0 for no reports.",
        limits=(0, 10**6),
        env="ACCELERATE_HANG_TIMEOUT",
    )
    hang_action: str | None = option(
        None,
        "What follows a report: report (the default) lets the run go on, abort ends all processes with an "
        "error.",
        choices=HANG_ACTIONS,
        env="ACCELERATE_HANG_ACTION",
    )
