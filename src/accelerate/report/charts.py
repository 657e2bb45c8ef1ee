"""Charts as SVG: lines over steps, and the share of each phase; with text for those who do not see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from accelerate.report.markup import tag
from accelerate.report.series import Column, Series, Split

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 60, 384, 10, 166
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """The values of one rank or run in a chart."""

    label: str
    series: Series


@dataclass(frozen=True)
class Scale:
    """Where a value is on an axis."""

    least: float
    most: float
    start: float
    end: float

    def at(self, value: float) -> float:
        half = self.most / 2 - self.least / 2  # the whole may be infinite
        share = (value / 2 - self.least / 2) / half if half else 0.5
        return self.start + share * (self.end - self.start)


def draw_lines(name: str, lines: Sequence[Line], number: Format, base: float = 10.0) -> Element | None:
    """Draw values over steps, with round values in a unit, a power of `base`; None where there are none."""
    lines = [line for line in lines if line.series.count]
    if not lines:
        return None
    ends = [step for line in lines for step in line.series.steps()]
    across = Scale(min(ends), max(ends), LEFT, RIGHT)
    finite = [line.series for line in lines if line.series.least is not None]
    least = min((series.least.value for series in finite if series.least), default=0.0)
    most = max((series.greatest.value for series in finite if series.greatest), default=1.0)
    up = Scale(*_around(least, most), BOTTOM, TOP)
    drawn = [
        part
        for index, line in enumerate(lines)
        for part in _draw_line(line.series, index, across, up, line.label)
    ]
    summary = "; ".join(_describe(line, number) for line in lines)
    legend = [(index, line.label) for index, line in enumerate(lines)] if len(lines) > 1 else []
    unit = base ** math.floor(math.log(most, base)) if most > 0 and base != 10 else 1.0
    return _figure(name, summary, [*_axes(across, up, number, unit), *drawn], legend, across, up)


def _draw_line(series: Series, index: int, across: Scale, up: Scale, label: str) -> Iterable[Element]:
    """Draw the line that a run kept; dashed, what it did before a restart and did again."""
    kept, repeated = split_lines(list(series.columns()))
    for columns, kind in [(columns, "line repeated") for columns in repeated] + [(kept, "line")]:
        if path := _path(columns, across, up):
            yield tag(
                "path", d=path, class_=f"{kind} c{index % 8}", data_label=label if columns is kept else None
            )
    invalid = [column.invalid for columns in [*repeated, kept] for column in columns]
    points = [point for point in invalid if point is not None]
    marks = "".join(f"M{across.at(point.step):.1f} {TOP - 8}l3 6h-6z" for point in points)
    if marks:
        yield tag("path", d=marks, class_="invalid")


def split_lines(lines: Sequence[Sequence[Column]]) -> tuple[list[Column], list[list[Column]]]:
    """Return the columns that no later line repeats, by step, and of each line those that one does."""
    kept: list[Column] = []
    repeated: list[list[Column]] = []
    first = math.inf  # step of the later lines
    for columns in reversed([columns for columns in lines if columns]):
        number = sum(column.first < first for column in columns)
        kept[:0] = columns[:number]
        if number < len(columns):
            repeated.append(list(columns[number:]))
        first = min(first, columns[0].first)
    return kept, repeated[::-1]


def _path(columns: Sequence[Column], across: Scale, up: Scale) -> str:
    """Return the path of a line, which has a gap where values are infinite or not a number."""
    parts: list[str] = []
    is_gap = True
    for column in columns:
        for point in column.points():
            x, y = f"{across.at(point.step):.1f}", f"{up.at(point.value):.1f}"
            # A line of no length has round ends, so that a single value is a dot.
            parts.append(f"M{x} {y}h0" if is_gap else f"L{x} {y}")
            is_gap = False
        is_gap = is_gap or column.invalid is not None
    return "".join(parts)


def draw_split(name: str, split: Split, phases: Sequence[str]) -> Element | None:
    """Draw the share of each phase over steps, one on top of the other; None where no time was recorded."""
    shares = list(split.shares())
    if not shares:
        return None
    across = Scale(shares[0][0], shares[-1][0] + split.width, LEFT, RIGHT)
    up = Scale(0.0, 1.0, BOTTOM, TOP)
    below = [0.0] * len(shares)
    drawn = []
    for index, phase in enumerate(phases):
        above = [base + by.get(phase, 0.0) for base, (_, by) in zip(below, shares, strict=True)]
        upper, lower = [], []
        for (step, _), low, high in zip(shares, below, above, strict=True):
            x, end = across.at(step), across.at(step + split.width)
            upper.append(f"L{x:.1f} {up.at(high):.1f}H{end:.1f}")
            lower.append(f"L{end:.1f} {up.at(low):.1f}H{x:.1f}")
        path = "M" + "".join(upper)[1:] + "".join(reversed(lower)) + "Z"
        drawn.append(tag("path", d=path, class_=f"area f{index % 8}"))
        below = above
    total = split.total()
    whole = sum(total.values())
    present = [phase for phase in phases if total.get(phase)]
    summary = ", ".join(f"{phase} {total[phase] / whole:.1%}" for phase in present)
    legend = [(index, phase) for index, phase in enumerate(phases) if phase in present]
    axes = _axes(across, up, "{:.0%}".format)
    return _figure(name, f"Of the whole time: {summary}", [*drawn, *axes], legend, across, up)


def _figure(
    name: str,
    summary: str,
    drawn: Sequence[Element],
    legend: Sequence[tuple[int, str]],
    across: Scale,
    up: Scale,
) -> Element:
    svg = tag(
        "svg",
        tag("title", name),
        tag("desc", summary),
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{name}. {summary}",
        data_x=f"{across.least} {across.most}",
        data_y=f"{up.least} {up.most}",
    )
    keys = [tag("li", tag("span", class_=f"key k{index % 8}"), label) for index, label in legend]
    return tag(
        "figure",
        tag("figcaption", name),
        tag("ul", keys, class_="legend") if keys else None,
        svg,
        tag("output", class_="hover"),
    )


def _axes(across: Scale, up: Scale, number: Format, unit: float = 1.0) -> Iterable[Element]:
    for value in (unit * value for value in ticks(up.least / unit, up.most / unit, 4)):
        y = f"{up.at(value):.1f}"
        yield tag("path", d=f"M{LEFT} {y}H{RIGHT}", class_="grid")
        yield tag("text", number(value), x=LEFT - 4, y=y, class_="tick up")
    for value in ticks(across.least, across.most, 4):
        yield tag("text", count(value), x=f"{across.at(value):.1f}", y=BOTTOM + 16, class_="tick across")


def ticks(least: float, most: float, most_ticks: int) -> list[float]:
    """Return round values between two values, which are finite; the only one where they are equal."""
    rough = (most - least) / most_ticks
    if rough <= 0 or not math.isfinite(rough):
        return [least]
    power = 10.0 ** math.floor(math.log10(rough))
    if not power:  # smaller than any power of ten that a float holds
        return [least]
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(least / step)
    return [index * step for index in range(first, math.floor(most / step) + 1)]


def _around(least: float, most: float) -> tuple[float, float]:
    """Return the ends of an axis for values between two others: some room where they are equal."""
    if least != most:
        return least, most
    room = abs(least) / 10 or 1.0
    return (least - room, most + room) if math.isfinite(abs(least) + room) else (least, most)


def _describe(line: Line, number: Format) -> str:
    """Describe a line in words."""
    series = line.series
    if series.least is None or series.greatest is None or series.last is None:
        return f"{line.label}: {series.count} values, none of which is finite"
    invalid = f", {series.invalid} not finite" if series.invalid else ""
    return (
        f"{line.label}: {series.count} values{invalid}, least {number(series.least.value)} at step "
        f"{series.least.step}, greatest {number(series.greatest.value)} at step {series.greatest.step}, "
        f"last {number(series.last.value)}"
    )


def plain_number(value: float) -> str:
    """Write a number with four digits."""
    return f"{value:.4g}"


def count(value: float) -> str:
    """Write a count with a unit where it is large."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 10:
            return f"{value / size:.4g}{unit}"
    return f"{value:.6g}"
