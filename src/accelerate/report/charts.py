"""SVG charts of a report, which are lines over steps and stacked areas of phase times.

Each chart has a text description for screen readers. `report.sections` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from accelerate.report.markup import tag
from accelerate.report.series import Column, PhaseSeconds, Series

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 60, 384, 10, 166
Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """Values of one rank or run in a chart."""

    label: str
    series: Series


@dataclass(frozen=True)
class Scale:
    """Linear map of values between `least` and `most` to coordinates of an axis."""

    least: float
    most: float
    start: float
    end: float

    def at(self, value: float) -> float:
        half = self.most / 2 - self.least / 2  # the difference itself may overflow
        fraction = (value / 2 - self.least / 2) / half if half else 0.5
        return self.start + fraction * (self.end - self.start)


def draw_lines(name: str, lines: Sequence[Line], number: Format, base: float = 10.0) -> Element | None:
    """Returns a chart of values over steps, or None if there are no values.

    Args:
        name: Title of the chart.
        number: Function that formats a value.
        base: Ticks are round multiples of a power of this number.
    """
    lines = [line for line in lines if line.series.count]
    if not lines:
        return None
    ends = [step for line in lines for step in line.series.steps()]
    x_scale = Scale(min(ends), max(ends), LEFT, RIGHT)
    finite = [line.series for line in lines if line.series.least is not None]
    least = min((series.least.value for series in finite if series.least), default=0.0)
    most = max((series.greatest.value for series in finite if series.greatest), default=1.0)
    y_scale = Scale(*_axis_range(least, most), BOTTOM, TOP)
    drawn = [
        part
        for index, line in enumerate(lines)
        for part in _draw_line(line.series, index, x_scale, y_scale, line.label)
    ]
    summary = "; ".join(_description_of(line, number) for line in lines)
    legend = [(index, line.label) for index, line in enumerate(lines)] if len(lines) > 1 else []
    unit = base ** math.floor(math.log(most, base)) if most > 0 and base != 10 else 1.0
    return _figure(name, summary, [*_axes(x_scale, y_scale, number, unit), *drawn], legend, x_scale, y_scale)


def _draw_line(series: Series, index: int, x_scale: Scale, y_scale: Scale, label: str) -> Iterable[Element]:
    """Yields the line of a series, with dashed lines for steps that were repeated after a restart."""
    kept, repeated = split_lines(list(series.columns()))
    shape = "line dot" if series.count - series.invalid == 1 else "line"
    for columns, kind in [(columns, "line repeated") for columns in repeated] + [(kept, shape)]:
        if path := _path(columns, x_scale, y_scale):
            yield tag(
                "path", d=path, class_=f"{kind} c{index % 8}", data_label=label if columns is kept else None
            )
    invalid = [column.invalid for columns in [*repeated, kept] for column in columns]
    points = [point for point in invalid if point is not None]
    marks = "".join(f"M{x_scale.at(point.step):.1f} {TOP - 8}l3 6h-6z" for point in points)
    if marks:
        yield tag("path", d=marks, class_="invalid")


def split_lines(lines: Sequence[Sequence[Column]]) -> tuple[list[Column], list[list[Column]]]:
    """Returns the columns whose steps no later line repeats, and for each line those that are repeated."""
    kept: list[Column] = []
    repeated: list[list[Column]] = []
    first = math.inf  # smallest step of the later lines
    for columns in reversed([columns for columns in lines if columns]):
        number = sum(column.first < first for column in columns)
        kept[:0] = columns[:number]
        if number < len(columns):
            repeated.append(list(columns[number:]))
        first = min(first, columns[0].first)
    return kept, repeated[::-1]


def _path(columns: Sequence[Column], x_scale: Scale, y_scale: Scale) -> str:
    """Returns the path of a line, which has gaps at values that are infinite or NaN."""
    parts: list[str] = []
    is_gap = True
    for column in columns:
        for point in column.points():
            x, y = f"{x_scale.at(point.step):.1f}", f"{y_scale.at(point.value):.1f}"
            # A line of zero length has round ends, so that a single value is a dot.
            parts.append(f"M{x} {y}h0" if is_gap else f"L{x} {y}")
            is_gap = False
        is_gap = is_gap or column.invalid is not None
    return "".join(parts)


def draw_phases(name: str, phase_seconds: PhaseSeconds, phases: Sequence[str]) -> Element | None:
    """Returns a chart of the stacked fractions of phases over steps, or None if no time was recorded."""
    fractions = list(phase_seconds.fractions())
    if not fractions:
        return None
    x_scale = Scale(fractions[0][0], fractions[-1][0] + phase_seconds.width, LEFT, RIGHT)
    y_scale = Scale(0.0, 1.0, BOTTOM, TOP)
    below = [0.0] * len(fractions)
    drawn = []
    for index, phase in enumerate(phases):
        above = [base + by.get(phase, 0.0) for base, (_, by) in zip(below, fractions, strict=True)]
        upper, lower = [], []
        for (step, _), low, high in zip(fractions, below, above, strict=True):
            x, end = x_scale.at(step), x_scale.at(step + phase_seconds.width)
            upper.append(f"L{x:.1f} {y_scale.at(high):.1f}H{end:.1f}")
            lower.append(f"L{end:.1f} {y_scale.at(low):.1f}H{x:.1f}")
        path = "M" + "".join(upper)[1:] + "".join(reversed(lower)) + "Z"
        drawn.append(tag("path", d=path, class_=f"area f{index % 8}"))
        below = above
    total = phase_seconds.total()
    whole = sum(total.values())
    present = [phase for phase in phases if total.get(phase)]
    summary = ", ".join(f"{phase} {total[phase] / whole:.1%}" for phase in present)
    legend = [(index, phase) for index, phase in enumerate(phases) if phase in present]
    axes = _axes(x_scale, y_scale, "{:.0%}".format)
    return _figure(name, f"Of the whole time: {summary}", [*drawn, *axes], legend, x_scale, y_scale)


def _figure(
    name: str,
    summary: str,
    drawn: Sequence[Element],
    legend: Sequence[tuple[int, str]],
    x_scale: Scale,
    y_scale: Scale,
) -> Element:
    svg = tag(
        "svg",
        tag("title", name),
        tag("desc", summary),
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{name}. {summary}",
        data_x=f"{x_scale.least} {x_scale.most}",
        data_y=f"{y_scale.least} {y_scale.most}",
    )
    keys = [tag("li", tag("span", class_=f"key k{index % 8}"), label) for index, label in legend]
    return tag(
        "figure",
        tag("figcaption", name),
        tag("ul", keys, class_="legend") if keys else None,
        svg,
        tag("output", class_="hover"),
    )


def _axes(x_scale: Scale, y_scale: Scale, number: Format, unit: float = 1.0) -> Iterable[Element]:
    for value in (unit * value for value in ticks(y_scale.least / unit, y_scale.most / unit, 4)):
        y = f"{y_scale.at(value):.1f}"
        yield tag("path", d=f"M{LEFT} {y}H{RIGHT}", class_="grid")
        yield tag("text", number(value), x=LEFT - 4, y=y, class_="tick up")
    for value in ticks(x_scale.least, x_scale.most, 4):
        yield tag(
            "text", format_count(value), x=f"{x_scale.at(value):.1f}", y=BOTTOM + 16, class_="tick across"
        )


def ticks(least: float, most: float, most_ticks: int) -> list[float]:
    """Returns round values between two finite values, or a single value if they are equal."""
    rough = (most - least) / most_ticks
    if rough <= 0 or not math.isfinite(rough):
        return [least]
    power = 10.0 ** math.floor(math.log10(rough))
    if not power:  # smaller than any power of ten that a float can represent
        return [least]
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(least / step)
    return [index * step for index in range(first, math.floor(most / step) + 1)]


def _axis_range(least: float, most: float) -> tuple[float, float]:
    """Returns the ends of an axis for values in a range, with a margin if the range is one value."""
    if least != most:
        return least, most
    margin = abs(least) / 10 or 1.0
    return (least - margin, most + margin) if math.isfinite(abs(least) + margin) else (least, most)


def _description_of(line: Line, number: Format) -> str:
    """Returns a description of a line for screen readers."""
    series = line.series
    if series.least is None or series.greatest is None or series.last is None:
        return f"{line.label}: {series.count} values, none of which is finite"
    invalid = f", {series.invalid} not finite" if series.invalid else ""
    return (
        f"{line.label}: {series.count} values{invalid}, least {number(series.least.value)} at step "
        f"{series.least.step}, greatest {number(series.greatest.value)} at step {series.greatest.step}, "
        f"last {number(series.last.value)}"
    )


def format_number(value: float) -> str:
    """Returns a number as text with four digits."""
    return f"{value:.4g}"


def format_count(value: float) -> str:
    """Returns a count as text, with a unit if it is large."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 10:
            return f"{value / size:.4g}{unit}"
    return f"{value:.6g}"
