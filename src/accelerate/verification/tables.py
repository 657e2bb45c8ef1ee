"""Table and JSON of the comparison of two runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from accelerate.verification.records import Finding, Run, Tolerances

WIDTH = 110  # columns


def format_runs(run: Run, reference: Run, findings: Sequence[Finding], num_steps: int) -> str:
    """Returns a table of the compared steps, the differences with their causes, and the result.

    Args:
        num_steps: Number of steps that were asked for.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{run.label} on {run.size} ranks, and the reference on {reference.size}")
    for heading in ("step", "samples", "loss", "reference", "gradient norm", "reference", "learning rate"):
        table.add_column(heading, justify="right")
    has_several = len({optimizer for optimizer, _ in run.steps}) > 1
    for (optimizer, number), step in run.steps.items():
        other = reference.steps.get((optimizer, number))
        table.add_row(
            f"{number} (optimizer {optimizer})" if has_several else str(number),
            str(sum(map(len, step.samples.values()))),
            _shown(step.loss),
            _shown(other.loss if other else None),
            _shown(step.norms[0]),
            _shown(other.norms[0] if other else None),
            _shown(step.rates[0] if step.rates else None),
        )
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH).print(table)
    lines = [buffer.getvalue().rstrip()]
    for finding in findings:
        which = f" of optimizer {finding.optimizer}" if has_several else ""
        where = f"step {finding.step}{which}: " if finding.step else ""
        prefix = "expected: " if finding.is_expected else ""
        lines.append(f"{prefix}{where}{finding.text}.")
        if finding.cause:
            lines.append(f"    {finding.cause}")
    count = max(number for _, number in run.steps)
    fewer = f" The script ended before step {num_steps}." if count < num_steps else ""
    lines.append(
        f"accelerate verify: this launch trains what the reference trains, over {count} steps.{fewer}"
        if all(finding.is_expected for finding in findings)
        else "accelerate verify: this launch does not train what the reference trains."
    )
    return "\n".join(lines)


def as_json(run: Run, reference: Run, findings: Sequence[Finding], tolerances: Tolerances) -> dict[str, Any]:
    return {
        "is_equal": all(finding.is_expected for finding in findings),
        "findings": [finding._asdict() for finding in findings],
        "tolerances": tolerances._asdict(),
        "launch": _steps_of(run),
        "reference": _steps_of(reference),
    }


def _steps_of(run: Run) -> dict[str, Any]:
    steps = [
        {
            "optimizer": optimizer,
            "step": number,
            "loss": step.loss,
            "gradient_norms": step.norms,
            "learning_rates": step.rates,
            "samples": list(step.samples.values()),
        }
        for (optimizer, number), step in run.steps.items()
    ]
    return {"strategy": run.label, "ranks": run.size, "data_parallel": run.num_groups, "steps": steps}


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
