"""What is written of a run: `results.json`, anew after each part, and a table for people."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GOOD = ("passed", "not available")


def commit_of(root: Path) -> str:
    """Return the commit of the source, with a mark where files were changed; "unknown" without git."""

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
            )
        except OSError:  # there is no git
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return f"{commit} with changes" if ask("status", "--porcelain") else commit


def fingerprint_of(root: Path) -> str:
    """Return a short digest of the package's source, which also names it where there is no git."""
    digest = hashlib.sha256()
    for path in sorted((root / "src").rglob("*.py*")):
        if path.suffix in (".py", ".pyi"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the file; a run that is cut off leaves a whole one."""
    written = path.with_suffix(".part")
    written.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(written, path)


def is_good(row: Mapping[str, Any]) -> bool:
    return row["status"] in GOOD and all(figure["is_met"] is not False for figure in row["figures"])


def value_of(figure: Mapping[str, Any], key: str = "value") -> str:
    value, unit = figure[key], figure["unit"]
    if unit == "B":
        return f"{value / 1e6:,.2f} MB"
    if unit == "B/s":
        return f"{value / 1e9:,.3f} GB/s"
    if unit == "s" and abs(value) < 1:
        return f"{value * 1e3:,.3f} ms"
    return f"{value:,.4g} {unit}".rstrip()


def budget_of(figure: Mapping[str, Any]) -> str:
    bounds = [("at_most", "<="), ("at_least", ">=")]
    text = " and ".join(f"{sign} {value_of(figure, key)}" for key, sign in bounds if figure[key] is not None)
    return f"{text}{'' if figure['is_met'] is not False else '  MISSED'}"


def lines_of(row: Mapping[str, Any], width: int) -> Iterable[str]:
    """Write a part: its status and, below, its figures with their budgets, and why it failed."""
    yield f"{row['name']:{width}}  {row['status']:13}  {row['seconds']:7.1f} s  {row['reason']}".rstrip()
    for note in row.get("notes", ()):
        yield f"{'':{width}}  {note}"
    for figure in row["figures"]:
        yield f"{'':{width}}  {figure['name']}: {value_of(figure)}  {budget_of(figure)}".rstrip()


def table(results: Mapping[str, Any]) -> str:
    rows = results["parts"]
    width = max(len(row["name"]) for row in rows)
    device, versions = results["device"] or {}, results["versions"] or {}
    head = [
        f"{device.get('name', 'no device')}  {results['date']}  commit {results['commit']}",
        "  ".join(f"{name} {version}" for name, version in versions.items()),
        *(
            ["Tiny sizes: the figures say nothing about speed, and no budget counts."]
            if results["tiny"]
            else []
        ),
    ]
    bad = [row["name"] for row in rows if not is_good(row)]
    counts = {status: sum(row["status"] == status for row in rows) for status in {r["status"] for r in rows}}
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    end = f"Not right: {', '.join(bad)}." if bad else "All parts are right."
    body = [line for row in rows for line in lines_of(row, width)]
    return "\n".join([*head, "", *body, "", f"{summary}; {results['seconds']:.0f} s. {end}"])
