"""A plan and the source of each of its values, as text and as JSON."""

from __future__ import annotations

import json
import shlex
from typing import Any

from accelerate.launch.backends import launcher_for
from accelerate.launch.plan import LaunchPlan
from accelerate.settings import SECTIONS, Option, Settings

HIDDEN = "(hidden)"


def as_text(plan: LaunchPlan, settings: Settings) -> str:
    """Say what a launch would do: notes, values with their sources, environment, command."""
    launcher = launcher_for(plan)
    parts: list[tuple[str, list[list[str]]]] = [
        ("Notes", [[note] for note in plan.notes]),
        ("Processes", [[_layout(plan)]]),
    ]
    for section in (section for section in SECTIONS if section.active(settings.values)):
        rows = [
            [row.name, str(_shown(row, settings.values[row.name])), settings.source(row.name)]
            for row in section.options()
        ]
        parts.append((str(section.__doc__).split("\n")[0].rstrip("."), rows))
    parts.append(("Environment added", [[name, text] for name, text in sorted(plan.environment.items())]))
    for path, text in launcher.files(plan).items():
        parts.append((f"File {path}", [[line] for line in text.splitlines()]))
    parts.append(("Command", [[shlex.join(launcher.command(plan))]]))
    return "\n\n".join("\n".join([title, *_columns(rows)]) for title, rows in parts)


def as_json(plan: LaunchPlan, settings: Settings) -> str:
    """The same as one JSON object."""
    launcher = launcher_for(plan)
    return json.dumps(
        {
            "launcher": plan.launcher,
            "processes": plan.processes,
            "machines": plan.machines,
            "machine": plan.machine,
            "meeting": {"backend": plan.rendezvous.rdzv_backend, "address": plan.address, "port": plan.port},
            "command": launcher.command(plan),
            "files": dict(launcher.files(plan)),
            "environment": dict(sorted(plan.environment.items())),
            "notes": list(plan.notes),
            "settings": {
                row.name: {"value": _shown(row, value), "source": source} for row, value, source in settings
            },
        },
        indent=2,
        default=str,
    )


def _layout(plan: LaunchPlan) -> str:
    if launcher_for(plan).counts_remotely:
        return f"as many as the machines there decide, by the {plan.launcher} launcher"
    text = f"{plan.processes} in total by the {plan.launcher} launcher"
    if plan.machines == 1:
        return f"{text}, on this machine"
    here = f"this is machine {plan.machine}, with {plan.ranks}"
    return f"{text}: {plan.layout}; {here}"


def _shown(row: Option, value: Any) -> Any:
    return HIDDEN if row.secret and value is not None else value


def _columns(rows: list[list[str]]) -> list[str]:
    """Align cells in columns; the last one is not padded."""
    if not rows:
        return ["  none"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
