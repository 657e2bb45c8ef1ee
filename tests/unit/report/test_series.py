"""Series: peaks stay, memory is bounded, a restart goes back, values that are not finite are gaps."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from accelerate.report import MAX_COLUMNS, MAX_LINES, Column, PhaseSeconds, Point, Series, split_lines


def filled(*values: tuple[int | None, float]) -> Series:
    series = Series()
    for step, value in values:
        series.add(step, value)
    return series


def columns_of(series: Series) -> list[Column]:
    return [column for columns in series.columns() for column in columns]


def drawn(series: Series) -> list[Point]:
    return [point for column in columns_of(series) for point in column.points()]


def test_few_values_are_all_kept() -> None:
    series = filled(*((step, float(step % 7)) for step in range(MAX_COLUMNS)))
    assert drawn(series) == [(step, step % 7) for step in range(MAX_COLUMNS)]


def test_a_single_peak_among_a_million_steps_is_drawn() -> None:
    series = filled(*((step, 1.0) for step in range(0, 1_000_000, 10)))
    assert len(columns_of(series)) <= MAX_COLUMNS
    series.add(1_000_000, 50.0)
    for step in range(1_000_001, 1_002_000):
        series.add(step, 1.0)
    assert (1_000_000, 50.0) in drawn(series)


@given(
    st.lists(
        st.tuples(st.integers(-(10**12), 10**12), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=900,
    )
)
def test_extremes_are_drawn_and_the_number_of_columns_is_bounded(values: list[tuple[int, float]]) -> None:
    series = filled(*values)
    finite = [value for _, value in values if math.isfinite(value)]
    points = [point.value for point in drawn(series)]
    assert (min(points, default=None), max(points, default=None)) == (
        min(finite, default=None),
        max(finite, default=None),
    )
    assert len(columns_of(series)) <= MAX_COLUMNS
    assert len(series.lines) <= MAX_LINES
    assert (series.count, series.invalid) == (len(values), len(values) - len(finite))
    assert any(column.invalid for column in columns_of(series)) == (len(finite) < len(values))


def test_a_step_without_a_number_follows_the_last_one() -> None:
    assert drawn(filled((None, 1.0), (None, 2.0), (7, 3.0), (None, 4.0))) == [(0, 1), (1, 2), (7, 3), (8, 4)]


def test_a_restart_keeps_what_was_not_repeated() -> None:
    series = filled((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 30.0), (4, 40.0), (5, 50.0))
    kept, repeated = split_lines(list(series.columns()))
    assert [column.points() for column in kept] == [[(1, 1)], [(2, 2)], [(3, 30)], [(4, 40)], [(5, 50)]]
    assert [[column.points() for column in columns] for columns in repeated] == [[[(3, 3)], [(4, 4)]]]


def test_two_restarts_from_the_same_checkpoint() -> None:
    series = filled((1, 1.0), (2, 2.0), (2, 20.0), (3, 30.0), (2, 200.0))
    kept, repeated = split_lines(list(series.columns()))
    assert [column.first for column in kept] == [1, 2]
    assert kept[-1].low == (2, 200.0)
    assert [[column.first for column in columns] for columns in repeated] == [[2, 3]]


def test_more_restarts_than_lines_are_still_counted() -> None:
    series = filled(*((step, 1.0) for _ in range(3 * MAX_LINES) for step in (1, 2)))
    assert len(series.lines) == MAX_LINES
    assert series.count == 6 * MAX_LINES


def test_a_column_of_values_that_are_not_finite_has_no_points() -> None:
    (column,) = columns_of(filled((1, math.nan)))
    assert column.points() == []
    assert column.invalid is not None
    assert column.first == 1


def test_shares_of_phases_add_up_and_are_bounded() -> None:
    split = PhaseSeconds()
    for step in range(10 * MAX_COLUMNS):
        split.add(step, {"data": 1.0, "forward": 3.0, "rest": math.nan})
    fractions = list(split.fractions())
    assert MAX_COLUMNS // 4 <= len(fractions) <= MAX_COLUMNS // 2
    assert {tuple(sorted(fraction.items())) for _, fraction in fractions} == {
        (("data", 0.25), ("forward", 0.75))
    }
    assert split.total() == {"data": 10.0 * MAX_COLUMNS, "forward": 30.0 * MAX_COLUMNS}
