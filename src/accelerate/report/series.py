"""Values over steps in bounded memory, for the charts of a report.

A series has the minimum and maximum of each range of steps, and phase times have sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_COLUMNS = 800
"""Most columns of all lines of a series, which are merged in pairs to half as many if there are more."""
MAX_LINES = 32
"""Most lines of a series, the last of which has all values of further restarts."""


class Point(NamedTuple):
    """One value, with the optimizer step or, for values logged without a step, the number of the call."""

    step: int
    value: float


@dataclass
class Column:
    """Minimum and maximum of consecutive values of a line, or None if no value is finite."""

    low: Point | None = None
    high: Point | None = None
    invalid: Point | None = None  # first value that is infinite or NaN

    def add(self, point: Point) -> None:
        if not math.isfinite(point.value):
            self.invalid = self.invalid or point
            return
        if self.low is None or point.value < self.low.value:
            self.low = point
        if self.high is None or point.value > self.high.value:
            self.high = point

    def merge(self, other: Column) -> None:
        """Adds all values of another column."""
        for point in other.all():
            self.add(point)

    @property
    def first(self) -> int:
        """Smallest step of the values."""
        return min(self.all()).step

    def all(self) -> list[Point]:
        return [point for point in (self.low, self.high, self.invalid) if point is not None]

    def points(self) -> list[Point]:
        """Returns the finite values to draw, sorted by step."""
        return sorted({point for point in (self.low, self.high) if point is not None})


@dataclass
class Series:
    """Values with one name on one rank, in the order in which they were written.

    A step that is smaller than the previous one starts a new line, because the run was restarted from a
    checkpoint.
    """

    count: int = 0
    invalid: int = 0  # number of values that are infinite or NaN
    last: Point | None = None
    least: Point | None = None
    greatest: Point | None = None
    lines: list[dict[int, Column]] = field(default_factory=lambda: [{}])
    width: int = 1  # number of steps in a column

    def add(self, step: int | None, value: float) -> None:
        """Adds a value, whose step defaults to the one after the last."""
        if step is None:
            step = 0 if self.last is None else self.last.step + 1
        point = Point(step, value)
        if self.last is not None and step < self.last.step and len(self.lines) < MAX_LINES:
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
            if sum(map(len, self.lines)) > MAX_COLUMNS:
                column.add(point)
                # Columns are merged in pairs until half of them are left, but at least one per line.
                while sum(map(len, self.lines)) > MAX_COLUMNS // 2:
                    self.width *= 2
                    self.lines = [_merged(columns) for columns in self.lines]
                return
        column.add(point)

    def columns(self) -> Iterator[list[Column]]:
        """Yields the columns of each line, sorted by step."""
        for line in self.lines:
            yield [line[index] for index in sorted(line)]

    def steps(self) -> tuple[int, int]:
        """Returns the smallest and the largest step of a series that has values."""
        steps = [point.step for columns in self.columns() for column in columns for point in column.all()]
        return min(steps), max(steps)


def _merged(columns: Mapping[int, Column]) -> dict[int, Column]:
    merged: dict[int, Column] = {}
    for index, column in columns.items():
        if (previous := merged.get(index // 2)) is None:
            merged[index // 2] = column
        else:
            previous.merge(column)
    return merged


@dataclass
class PhaseSeconds:
    """Seconds of each phase over steps, summed over all starts of a run that executed a step."""

    columns: dict[int, dict[str, float]] = field(default_factory=dict)
    width: int = 1

    def add(self, step: int, seconds_by: Mapping[str, float]) -> None:
        _add_seconds(self.columns.setdefault(step // self.width, {}), seconds_by)
        while len(self.columns) > MAX_COLUMNS // 2:
            self.width *= 2
            previous, self.columns = self.columns, {}
            for index, seconds in previous.items():
                _add_seconds(self.columns.setdefault(index // 2, {}), seconds)

    def fractions(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields the first step of each column and the fractions of the phases, which add up to 1."""
        for index in sorted(self.columns):
            whole = sum(self.columns[index].values())
            if whole > 0:
                yield (
                    index * self.width,
                    {name: seconds / whole for name, seconds in self.columns[index].items()},
                )

    def total(self) -> dict[str, float]:
        """Returns the seconds of all steps by phase."""
        total: dict[str, float] = {}
        for seconds in self.columns.values():
            _add_seconds(total, seconds)
        return total


def _add_seconds(total: dict[str, float], seconds_by: Mapping[str, float]) -> None:
    for name, seconds in seconds_by.items():
        if math.isfinite(seconds) and seconds > 0:
            total[name] = total.get(name, 0.0) + seconds
