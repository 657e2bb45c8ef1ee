"""Records of a run over all its ranks, and differences between two of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Tolerances(NamedTuple):
    """Largest accepted relative differences.

    Attributes:
        loss: Of a loss, relative to the largest loss of the compared steps.
        norm: Of a gradient norm.
        update: Of the change of a parameter or a buffer over all steps, relative to this change.
        rounding: Size of a gradient, relative to the largest one of the model, below which it is rounding,
            such as that of the bias of keys in attention. Adam then moves it in any direction.
    """

    loss: float
    norm: float
    update: float
    rounding: float


TOLERANCES = {
    "no": Tolerances(1e-4, 1e-3, 0.02, 1e-5),
    "fp16": Tolerances(1e-2, 3e-2, 0.3, 5e-3),
    "bf16": Tolerances(2e-2, 5e-2, 0.4, 2e-2),
    "fp8": Tolerances(5e-2, 0.15, 0.6, 5e-2),
}
"""Mixed precision, or dtype of the weights -> tolerances."""


def tolerances_of(run: Run, factor: float | None = None) -> Tolerances:
    """Returns the tolerances of a run, times a factor."""
    tolerances = TOLERANCES.get(run.precision, TOLERANCES["no"])
    return tolerances if factor is None else Tolerances(*(factor * value for value in tolerances))


@dataclass(frozen=True)
class Step:
    """One step of an optimizer, over all ranks.

    Attributes:
        loss: Mean loss of the samples, or None if no loss was recorded.
        norms: Gradient norm on each rank.
        rates: Learning rate of each parameter group.
        rates_of_ranks: Learning rates on each rank.
        settings: Other numbers of each parameter group, by their names.
        samples: Samples of each data-parallel group, as texts of loader, pass and index. There are none if a
            replica group has not recorded the step.
        by_index: Whether samples are named by their index in the dataset, and not by a digest.
        positions: Number of steps that each prepared scheduler has taken.
        contents: Shapes and digest of each sample.
    """

    loss: float | None
    norms: list[float | None]
    rates: list[float]
    rates_of_ranks: list[list[float]]
    settings: list[dict[str, Any]]
    samples: dict[int, list[str]]
    by_index: bool
    positions: list[int]
    contents: dict[str, str]


@dataclass
class Run:
    """Records of one run over all ranks.

    Attributes:
        num_groups: Number of data-parallel groups.
        divides_sequences: Whether ranks have parts of each sequence.
        precision: Mixed precision.
        is_complete: Whether the weights after the last step were written.
        steps: Steps by optimizer and number.
        batch_norms: Names of batch normalizations that are not synchronized.
        outputs: Projections of the rows of the inputs and outputs of modules by data-parallel group.
        gradients: Norm of the gradient of each parameter in the step that was traced.
        sizes: Largest size of the gradient of each parameter, relative to the largest one of a step.
    """

    folder: Path
    size: int = 0
    num_groups: int = 0
    divides_sequences: bool = False
    precision: str = "no"
    label: str = ""
    is_complete: bool = False
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    batch_norms: list[str] = field(default_factory=list)
    outputs: dict[int, dict[str, list[list[float]]]] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)


class Finding(NamedTuple):
    """A difference between the runs.

    Attributes:
        step: Step of the first difference, or 0 for the weights.
        what: "samples", "loss", "gradient norm", "learning rate", "settings", "weights" or "buffers".
        text: The difference in one sentence.
        cause: Likely cause with a fix, or "".
        is_expected: Whether the script asks for the difference, so that it is no fault.
        optimizer: Number of the optimizer that takes the step.
    """

    step: int
    what: str
    text: str
    cause: str = ""
    is_expected: bool = False
    optimizer: int = 0


def read_run(folder: Path) -> Run:
    """Reads the records of all ranks of a run."""
    run, groups = Run(folder), dict[tuple[int, int], list[tuple[dict[str, Any], dict[str, Any]]]]()
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not lines:
            continue
        head = lines[0]
        run.size, run.num_groups = head["size"], head["num_groups"]
        run.precision, run.label = head["precision"], head["label"]
        run.divides_sequences = head["divides_sequences"]
        names = [name for line in lines if line["kind"] == "model" for name in line["batch_norms"]]
        run.batch_norms = list(dict.fromkeys([*run.batch_norms, *names]))
        for line in lines[1:]:
            if line["kind"] == "step":
                groups.setdefault((line["optimizer"], line["step"]), []).append((head, line))
            elif line["kind"] == "end":
                run.is_complete = True
                run.gradients |= line["gradients"]
                run.sizes = run.sizes or line["sizes"]
                run.outputs.setdefault(head["group"], {}).update(line["outputs"])
    run.steps = {key: _merge(lines) for key, lines in sorted(groups.items(), key=lambda item: item[0][::-1])}
    return run


def _merge(lines: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Step:
    """Returns a step from the records of its ranks."""
    lines = sorted(lines, key=lambda pair: int(pair[0]["rank"]))
    replicas = lines[0][0]["replicas"]
    members = {head["rank"] // (head["size"] // replicas) for head, _ in lines}
    is_whole = len(members) == lines[0][1]["members"]  # a replica group may have ended before its record
    losses = [pair for _, line in lines for pair in line["losses"]] if is_whole else []
    items = [count for _, count in losses if count >= 0]
    if not losses:
        loss = None
    elif items:
        loss = sum(value for value, _ in losses) / max(sum(items), 1e-30)
    else:
        loss = sum(value for value, _ in losses) / len(lines)
        if replicas > 1:  # losses of micro-batches are parts of the mean
            loss *= len(members)
    samples: dict[int, list[str]] = {}
    by_index, contents = True, dict[str, str]()
    for head, line in lines:
        if head["group"] in samples or not is_whole:
            continue
        samples[head["group"]] = []
        for loader, number, _, has_indices, rows, digests in line["samples"]:
            by_index = by_index and has_indices
            names = [f"{loader}/{number}/{row}" for row in rows]
            samples[head["group"]] += names
            contents.update(zip(names, digests, strict=False))
    norms = [line["norm"] for _, line in lines]
    first, rates = lines[0][1], [line["rates"] for _, line in lines]
    return Step(
        loss, norms, rates[0], rates, first["settings"], samples, by_index, first["positions"], contents
    )
