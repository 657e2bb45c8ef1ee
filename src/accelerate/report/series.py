"""Values over steps in bounded memory: least and greatest value of each column, and sums of phases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

COLUMNS = 800
"""Most columns of all lines of a series together; half as many remain when they are joined in pairs."""
LINES = 32
"""Most lines of a series; where the steps go back more often, the last line has the further values."""


class Point(NamedTuple):
    """One value; `step` is that of the optimizer, or the number of the call where no step was given."""

    step: int
    value: float


@dataclass
class Column:
    """Consecutive values of a line; `low` and `high` are None where none of them is finite."""

    low: Point | None = None
    high: Point | None = None
    invalid: Point | None = None  # the first one that is infinite or not a number

    def add(self, point: Point) -> None:
        if not math.isfinite(point.value):
            self.invalid = self.invalid or point
            return
        if self.low is None or point.value < self.low.value:
            self.low = point
        if self.high is None or point.value > self.high.value:
            self.high = point

    def merge(self, other: Column) -> None:
        """Add all values of another column."""
        for point in other.all():
            self.add(point)

    @property
    def first(self) -> int:
        """The least step of its values."""
        return min(self.all()).step

    def all(self) -> list[Point]:
        return [point for point in (self.low, self.high, self.invalid) if point is not None]

    def points(self) -> list[Point]:
        """Return the finite values to draw, by step."""
        return sorted({point for point in (self.low, self.high) if point is not None})


@dataclass
class Series:
    """The values of one name on one rank, in the order in which they were written.

    A step that is smaller than the one before starts a new line: the run was restarted from a checkpoint.
    """

    count: int = 0
    invalid: int = 0  # how many values are infinite or not a number
    last: Point | None = None
    least: Point | None = None
    greatest: Point | None = None
    lines: list[dict[int, Column]] = field(default_factory=lambda: [{}])
    width: int = 1  # steps of a column

    def add(self, step: int | None, value: float) -> None:
        """Add a value; without a step it belongs to the one after the last."""
        if step is None:
            step = 0 if self.last is None else self.last.step + 1
        point = Point(step, value)
        if self.last is not None and step < self.last.step and len(self.lines) < LINES:
            self.lines.append({})
        self.count += 1
        self.last = point
        if not math.isfinite(value):
            self.invalid += 1
        else:
            if self.least is None or value < self.least.value:
                self.least = point
            if self.greatest is None or value > self.greatest.value:
                self.greatest = point
        columns = self.lines[-1]
        column = columns.get(step // self.width)
        if column is None:
            column = columns[step // self.width] = Column()
            if sum(map(len, self.lines)) > COLUMNS:
                column.add(point)
                self._halve()
                return
        column.add(point)

    def _halve(self) -> None:
        """Join columns in pairs, until half of them are left; a line has at least one."""
        while sum(map(len, self.lines)) > COLUMNS // 2:
            self.width *= 2
            self.lines = [_joined(columns) for columns in self.lines]

    def columns(self) -> Iterator[list[Column]]:
        """Yield the columns of each line, by step."""
        for line in self.lines:
            yield [line[index] for index in sorted(line)]

    def steps(self) -> tuple[int, int]:
        """Return the first and the last step of a series that has values."""
        steps = [point.step for columns in self.columns() for column in columns for point in column.all()]
        return min(steps), max(steps)


def _joined(columns: Mapping[int, Column]) -> dict[int, Column]:
    joined: dict[int, Column] = {}
    for index, column in columns.items():
        if (before := joined.get(index // 2)) is None:
            joined[index // 2] = column
        else:
            before.merge(column)
    return joined


@dataclass
class Split:
    """Seconds by phase over steps; steps that several starts of a run have done are added up."""

    columns: dict[int, dict[str, float]] = field(default_factory=dict)
    width: int = 1

    def add(self, step: int, seconds_by: Mapping[str, float]) -> None:
        _add_seconds(self.columns.setdefault(step // self.width, {}), seconds_by)
        while len(self.columns) > COLUMNS // 2:
            self.width *= 2
            before, self.columns = self.columns, {}
            for index, seconds in before.items():
                _add_seconds(self.columns.setdefault(index // 2, {}), seconds)

    def shares(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the first step of each column and the share of each phase, in order; they add up to 1."""
        for index in sorted(self.columns):
            whole = sum(self.columns[index].values())
            if whole > 0:
                yield (
                    index * self.width,
                    {name: seconds / whole for name, seconds in self.columns[index].items()},
                )

    def total(self) -> dict[str, float]:
        """Return the seconds of all steps by phase."""
        total: dict[str, float] = {}
        for seconds in self.columns.values():
            _add_seconds(total, seconds)
        return total


def _add_seconds(total: dict[str, float], seconds_by: Mapping[str, float]) -> None:
    for name, seconds in seconds_by.items():
        if math.isfinite(seconds) and seconds > 0:
            total[name] = total.get(name, 0.0) + seconds
