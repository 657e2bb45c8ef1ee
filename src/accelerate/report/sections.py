"""Sections of the page of a report, each of which compares one or several runs.

`report.page` calls the functions. They return None for a section without content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any
from xml.etree.ElementTree import Element

from accelerate.base import convert_bytes, describe_mesh, spell_ranks
from accelerate.monitoring import PHASES, Conclusion
from accelerate.report.charts import Line, draw_lines, draw_phases, format_number
from accelerate.report.goodput import PARTS
from accelerate.report.markup import escaped_size, shortened, tag
from accelerate.report.reading import (
    ITEMS,
    MAX_DRAWN_RANKS,
    MAX_ENTRIES,
    MEMORY,
    MFU,
    STEPS_PER_SECOND,
    TFLOPS,
    THROUGHPUT,
    RankTotals,
    RecordGroups,
    Run,
)
from accelerate.report.series import Series

MAX_CHARTS = 48
"""Most charts of values. Further names are only in the table."""
MAX_LINES = 80
"""Most lines in all charts of values, each of which has up to 18 KB."""
MAX_CONCLUSIONS = 100
MAX_RANKS = 64
"""Most rows of the table of ranks. If there are more ranks, the slowest ones are shown."""
SHORT_TABLE = 20
"""Most rows of a table that is expanded at first."""
MAX_VALUE_LENGTH, MAX_TRACEBACK_LENGTH = 400, 20_000
MAX_TEXT = 300_000
"""Bytes after which the texts of events of a run are shortened. For the cells of a table it is a third."""
MAX_FAILURES = 4
"""Most texts of launchers and most tracebacks of a failed run."""
FIRST_NAMES = ("loss", "learning_rate", "gradient_norm")
"""Names of values that are displayed before the others."""
Cell = str | int | float | Element | None
_NUMBER = re.compile(r"-?(inf|nan|\d[\d.,]*(e[+-]?\d+)?)( bytes| [KMGTP]B|%)?")


def headings(runs: Sequence[Run], now: float) -> Iterator[Element]:
    """Yields the headings of each run, with its state, number of ranks, steps and duration."""
    for run in runs:
        state, text = run.outcome()
        first, last = run.ranks[run.first_rank], run.last_time
        size = run.starts[-1].world_size if run.starts else len(run.ranks)
        facts = [f"{size} {'rank' if size == 1 else 'ranks'}", f"step {first.last_step:,}"]
        if run.mesh:
            facts.insert(1, f"mesh {shortened(describe_mesh(run.mesh), MAX_VALUE_LENGTH)}")
        if run.starts:
            facts += [
                f"started {format_time(run.starts[0].time)}",
                format_duration(last - run.starts[0].time),
            ]
        if run.num_attempts > 1:
            restarts = run.num_attempts - 1
            facts.append("1 restart" if restarts == 1 else f"{restarts} restarts")
        elif run.num_group_starts:
            count = run.num_group_starts
            facts.append(f"{count} {'rank' if count == 1 else 'ranks'} of replica groups started again")
        damaged = sum(summary.damaged for summary in run.ranks.values())
        badge = tag("span", state, class_=f"state {state.replace(' ', '-')}")
        yield tag("h1", run.name, " ", badge)
        age = f" The last record is of {format_time(last)}, {format_duration(now - last)} before this page."
        yield tag("p", text, age if state == "no end" else None)
        yield tag("p", "; ".join(facts), class_="note")
        if damaged:
            yield tag("p", f"{damaged} lines of the records could not be read.", class_="note")


def failures(runs: Sequence[Run]) -> Iterator[Element]:
    """Yields the messages of the launcher about failures, and the tracebacks of ranks."""
    for run in runs:
        ends = [end for end in run.ends() if end.how == "failed"]
        digests = dict.fromkeys(end.digest for end in ends if end.digest)
        errors = dict.fromkeys(end.error for end in ends if end.error)
        if texts := [*list(digests)[:MAX_FAILURES], *list(errors)[:MAX_FAILURES]]:
            shown = [tag("pre", shortened(text, MAX_TRACEBACK_LENGTH // len(runs))) for text in texts]
            yield tag("section", tag("h2", _titled("Failure", run, runs)), shown)


def conclusions(runs: Sequence[Run]) -> Element | None:
    entries = [(run, entry) for run in runs for entry in run.conclusions.in_order()][:MAX_CONCLUSIONS]
    items = [
        tag(
            "li",
            f"{run.name}: " if len(runs) > 1 else None,
            tag("strong", shortened(entry.record.name, MAX_VALUE_LENGTH)),
            f" (step {entry.last_step:,}): {shortened(conclusion_text(entry.record), MAX_VALUE_LENGTH)}",
        )
        for run, entry in entries
    ]
    return _section("Conclusions", tag("ul", items, class_="conclusions") if items else None)


def conclusion_text(conclusion: Conclusion) -> str:
    """Returns the text of a conclusion without its name as a prefix."""
    return conclusion.text.removeprefix(f"{conclusion.name.replace('-', ' ')}: ")


def mesh_lines(run: Run) -> list[str]:
    """Returns the sizes of the mesh of a run and the positions of its first ranks, if it has a mesh."""
    if not run.mesh:
        return []
    ranks = [summary for summary in run.current() if summary.position]
    lines = [f"rank {summary.rank} = {summary.position}" for summary in ranks[:MAX_DRAWN_RANKS]]
    rest = len(ranks) - len(lines)
    return [f"mesh: {describe_mesh(run.mesh)}", *lines, *[f"and {rest} more ranks"] * (rest > 0)]


def values(runs: Sequence[Run]) -> Element | None:
    """Returns charts and a table of the logged values."""
    present = {name for run in runs for name in run.values}
    names = [name for name in FIRST_NAMES if name in present]
    names += sorted(present - set(FIRST_NAMES))
    charts: list[Element | None] = []
    rows: list[list[Cell]] = []
    drawn = 0
    for name in names:
        lines = _lines([(run, run.values.get(name, {})) for run in runs])
        if len(charts) < MAX_CHARTS and drawn + len(lines) <= MAX_LINES:
            drawn += len(lines)
            charts.append(draw_lines(shortened(name, MAX_VALUE_LENGTH), lines, format_number))
        rows += [[name, line.label, *_statistics(line.series)] for line in lines]
    header = ["name", "of", "values", "last", "least", "at step", "greatest", "at step", "not finite"]
    texts = [[name, text] for run in runs for name, text in run.texts.items()]
    left_out = sum(run.left_out for run in runs)
    return _section(
        "Values",
        tag("div", charts, class_="charts") if charts else None,
        _collapsed(f"All {len(rows)} as a table", table(header, rows)) if rows else None,
        _collapsed("Text that was logged last", table(["name", "text"], texts)) if texts else None,
        tag("p", f"{left_out:,} values of further names are left out.", class_="note") if left_out else None,
    )


def _statistics(series: Series) -> list[Cell]:
    least, greatest, last = series.least, series.greatest, series.last
    return [
        series.count,
        None if last is None else format_number(last.value),
        *(("", "") if least is None else (format_number(least.value), least.step)),
        *(("", "") if greatest is None else (format_number(greatest.value), greatest.step)),
        series.invalid,
    ]


def _lines(series: Iterable[tuple[Run, dict[int, Series]]]) -> list[Line]:
    """Returns one line per rank for a single run, or one line per run for several runs."""
    series = list(series)
    if len(series) > 1:
        return [
            Line(run.name, by_rank.get(run.first_rank, by_rank[min(by_rank)]))
            for run, by_rank in series
            if by_rank
        ]
    return [Line(f"rank {rank}", one) for rank, one in sorted(series[0][1].items())]


def goodput(runs: Sequence[Run]) -> Element | None:
    """Returns a table of the parts of the wall time, and one of the attempts that failed."""
    measured = [run.goodput() for run in runs]
    if all(found is None for found in measured):
        return None
    rows: list[list[Cell]] = []
    for part in PARTS:
        row: list[Cell] = [part]
        for found in measured:
            seconds = 0.0 if found is None else found.seconds_by[part]
            whole = 0.0 if found is None else found.wall
            row += [f"{seconds:.2f}", f"{seconds / whole:.1%}" if whole else ""]
        rows.append(row)
    header = ["part of the wall time"]
    notes = []
    for run, found in zip(runs, measured, strict=True):
        header += [_titled("seconds", run, runs), "share"]
        if found is not None and found.wall:
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            lines = [shortened(line, MAX_VALUE_LENGTH) for line in found.lines()]
            notes.append(tag("p", f"{prefix}{'; '.join(lines)}."))
    attempts: list[list[Cell]] = []
    for run, found in zip(runs, measured, strict=True):
        for attempt in [] if found is None else found.failures:
            cells: list[Cell] = [attempt.number, format_time(attempt.time), attempt.rank, attempt.text]
            step = "" if attempt.step < 0 else attempt.step
            newest = f"{attempt.checkpoint} (step {attempt.checkpoint_step})" if attempt.checkpoint else ""
            attempts.append([*_named(run, runs), *cells, step, newest])
    names = [*_of(runs), "restarts before", "ended", "by rank", "which", "after step", "newest checkpoint"]
    failed = _long_table(names, attempts)
    title = tag("h3", "Attempts that failed") if failed is not None else None
    return _section("Goodput", *notes, table(header, rows), title, failed)


def speed(runs: Sequence[Run]) -> Element | None:
    """Returns charts of throughput, FLOPs and memory over steps."""
    throughput = THROUGHPUT if any(THROUGHPUT in run.measured for run in runs) else STEPS_PER_SECOND
    charts = []
    scales: list[tuple[str, Callable[[float], str], float]] = [
        (throughput, format_number, 10.0),
        (ITEMS, format_number, 10.0),
        (TFLOPS, format_number, 10.0),
        (MFU, "{:.1%}".format, 10.0),
        (MEMORY, convert_bytes, 1024.0),
    ]
    for name, number, base in scales:
        lines = _lines([(run, run.measured.get(name, {})) for run in runs])
        charts.append(draw_lines(name, lines, number, base))
    note = None
    if len(runs) == 1 and len(runs[0].ranks) > MAX_DRAWN_RANKS:
        note = tag(
            "p", f"Of {len(runs[0].ranks)} ranks the first {MAX_DRAWN_RANKS} are drawn.", class_="note"
        )
    drawn = [chart for chart in charts if chart is not None]
    return _section("Throughput and memory", tag("div", drawn, class_="charts") if drawn else None, note)


def phase_times(runs: Sequence[Run]) -> Element | None:
    """Returns a chart of the phases of a step on the first rank, and a table of their seconds."""
    charts = [
        draw_phases(
            _titled(f"Share of each phase, rank {run.first_rank}", run, runs), run.phase_seconds, PHASES
        )
        for run in runs
    ]
    drawn = [chart for chart in charts if chart is not None]
    rows: list[list[Cell]] = []
    for phase in PHASES:
        row: list[Cell] = [phase]
        for run in runs:
            total = run.phase_seconds.total()
            whole = sum(total.values())
            row += [f"{total.get(phase, 0.0):.2f}", f"{total.get(phase, 0.0) / whole:.1%}" if whole else ""]
        rows.append(row)
    header = ["phase"]
    for run in runs:
        header += [_titled("seconds", run, runs), "share"]
    return _section(
        "Time", tag("div", drawn, class_="charts") if drawn else None, table(header, rows) if drawn else None
    )


def ranks(runs: Sequence[Run]) -> Element | None:
    """Returns a table of the ranks of each run, and a chart of their compute times."""
    parts: list[Element | None] = []
    for run in runs:
        timed = [summary for summary in run.ranks.values() if summary.steps]
        timed.sort(key=lambda summary: summary.seconds / summary.steps, reverse=True)
        shown = sorted(timed[:MAX_RANKS], key=lambda summary: summary.rank)
        if not shown:
            continue
        has_mesh = any(summary.position for summary in shown)
        header = ["rank", *["in the mesh"] * has_mesh]
        has_nodes = any(summary.start is not None and summary.start.num_nodes > 1 for summary in shown)
        header += ["node"] * has_nodes
        header += ["device", "steps", "ms per step", "own work", "data", "collectives"]
        has_flops = any(summary.flops for summary in shown)
        header += ["TFLOP/s", "MFU"] * has_flops
        rows = [_rank_row(summary, run, has_mesh, has_flops, has_nodes) for summary in shown]
        lines = [Line(name, run.compute[name]) for name in ("least", "mean", "most") if name in run.compute]
        chart = draw_lines("seconds of own work per step, of all ranks", lines, format_number)
        if len(runs) > 1:
            parts.append(tag("h3", run.name))
        parts.append(tag("div", chart, class_="charts") if chart is not None else None)
        parts.append(table([*header, "greatest memory", "slower than the mean"], rows))
        if len(timed) > len(shown):
            text = f"Of {len(timed)} ranks, those {len(shown)} that took longest for a step."
            parts.append(tag("p", text, class_="note"))
    return _section("Ranks", *parts)


def _rank_row(summary: RankTotals, run: Run, has_mesh: bool, has_flops: bool, has_nodes: bool) -> list[Cell]:
    by, steps, start = summary.seconds_by, summary.steps, summary.start
    own = summary.seconds - by.get("collectives", 0.0) - by.get("saving", 0.0)
    slow = run.slow.get(summary.rank)
    flops, mfu = summary.flops_per_second, summary.mfu
    return [
        summary.rank,
        *[summary.position] * has_mesh,
        *[start.node if start else ""] * has_nodes,
        (start.device_name or start.device) if start else "",
        steps,
        *(f"{1000 * seconds / steps:.3g}" for seconds in (summary.seconds, own)),
        *(f"{by.get(name, 0.0) / summary.seconds:.1%}" if summary.seconds else "" for name in _TIMED_PHASES),
        *(f"{flops / 1e12:.4g}" if flops else "", "" if mfu is None else f"{mfu:.1%}") * has_flops,
        convert_bytes(summary.peak_memory),
        "" if slow is None else f"{slow:.0%}",
    ]


_TIMED_PHASES = ("data", "collectives")


def checkpoints(runs: Sequence[Run]) -> Element | None:
    """Returns tables of the recorded checkpoints and of those in the folder of the run."""
    rows: list[list[Cell]] = []
    for run in runs:
        for entry in run.checkpoints.in_order():
            record = entry.record
            seconds = [f"{value:.2f}" if value else "" for value in (record.seconds, record.blocked)]
            size = convert_bytes(record.size) if record.size else ""
            state = f"{record.event}: {record.text}" if record.text else record.event
            path = record.path.removeprefix(f"{os.path.abspath(run.folder)}{os.sep}")
            where = [*_named(run, runs), format_time(record.time), record.step, path]
            rows.append([*where, state, *seconds, size])
    header = [*_of(runs), "time", "step", "checkpoint", "state", "seconds", "of which blocked", "size"]
    stored = [[*_named(run, runs), *row] for run in runs for row in run.stored]
    return _section(
        "Checkpoints",
        _long_table(header, rows),
        _note_left_out([run.checkpoints for run in runs]),
        tag("h3", "In the folder") if stored else None,
        _long_table([*_of(runs), "checkpoint", "step", "saved (UTC)", "size", "state"], stored),
    )


def starts(runs: Sequence[Run]) -> Element | None:
    """Returns a table of the first start and the restarts of the first rank."""
    rows: list[list[Cell]] = []
    for run in runs:
        for start in run.starts:
            where = [*_named(run, runs), format_time(start.time), start.attempt]
            rows.append([*where, start.world_size, start.num_nodes, start.script])
    header = [*_of(runs), "time", "restarts before", "ranks", "nodes", "script"]
    return _section("Starts", _long_table(header, rows))


def events(runs: Sequence[Run]) -> Element | None:
    """Returns a table of hangs, stops, warnings and other events."""
    rows: list[list[Cell]] = []
    for run in runs:
        available = MAX_TEXT // len(runs)
        for entry in run.events.in_order():
            record = entry.record
            where = spell_ranks(sorted(entry.ranks)[:MAX_RANKS])
            text = shortened(record.text, min(MAX_TRACEBACK_LENGTH, max(available, MAX_VALUE_LENGTH // 2)))
            available -= escaped_size(text)
            what: list[Cell] = [format_time(record.time), record.step, record.name, where, entry.count]
            rows.append([*_named(run, runs), *what, tag("span", text)])
    header = [*_of(runs), "time", "step", "event", "on", "times", "text"]
    left_out = _note_left_out([run.events for run in runs])
    return _section("Events", _long_table(header, rows), left_out)


def configuration(runs: Sequence[Run]) -> Element | None:
    """Returns a table of the settings and the source of each value, with differences between runs first."""
    settings_of_runs: list[dict[str, tuple[str, str]]] = []
    for run in runs:
        settings = run.starts[-1].settings[:MAX_ENTRIES] if run.starts else []
        values = {str(row.name): (str(row.value), str(row.source)) for row in settings}
        values |= {name: (value, "init_trackers") for name, value in run.config.items()}
        settings_of_runs.append(values)
    names = dict.fromkeys(name for values in settings_of_runs for name in values)
    rows = []
    for name in names:
        cells = [values.get(name, ("", "")) for values in settings_of_runs]
        differs = len({value for value, _ in cells}) > 1
        rows.append((differs, [name, *(text for cell in cells for text in cell)]))
    rows.sort(key=lambda row: not row[0])
    header = ["name"]
    for run in runs:
        header += [_titled("value", run, runs), "source"]
    shown = table(header, [row for _, row in rows], [differs for differs, _ in rows]) if rows else None
    return _section(
        "Configuration", _collapsed(f"{len(rows)} settings", shown) if shown is not None else None
    )


def nodes(runs: Sequence[Run]) -> Element | None:
    """Returns tables of the nodes with their devices, and of the versions of packages."""
    ranks_by_node: dict[tuple[Cell, ...], list[int]] = {}
    versions: dict[str, list[str]] = {}
    for position, run in enumerate(runs):
        for summary in run.current():
            if summary.start is None:
                continue
            device = summary.start.device_name or summary.start.device
            where = (*_named(run, runs), summary.start.node, device)
            ranks_by_node.setdefault(where, []).append(summary.rank)
            for name, version in summary.start.versions.items():
                cells = versions.setdefault(str(name), [""] * len(runs))
                cells[position] = cells[position] or str(version)
    rows = [[*where, spell_ranks(found)] for where, found in list(ranks_by_node.items())[: 2 * MAX_RANKS]]
    header = ["package", *(_titled("version", run, runs) for run in runs)]
    return _section(
        "Nodes and versions",
        table([*_of(runs), "node", "device", "ranks"], rows) if rows else None,
        table(header, [[name, *cells] for name, cells in list(versions.items())[:MAX_ENTRIES]])
        if versions
        else None,
    )


def table(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], marked: Sequence[bool] | None = None
) -> Element:
    """Returns a table that scrolls horizontally on narrow pages, with numbers aligned to the right."""
    numeric = [
        all(_is_number(row[position]) for row in rows)
        and any(row[position] not in ("", None) for row in rows)
        for position in range(len(header))
    ]
    width = _width_of([cell for row in rows for cell in row if isinstance(cell, str)])
    kinds = ["number" if is_number else None for is_number in numeric]
    top = [tag("th", name, scope="col", class_=kind) for name, kind in zip(header, kinds, strict=True)]
    body = [
        tag(
            "tr",
            [tag("td", _cell(value, width), class_=kind) for value, kind in zip(row, kinds, strict=True)],
            class_="differs" if marked and marked[index] and len(header) > 3 else None,
        )
        for index, row in enumerate(rows)
    ]
    element = tag("table", tag("thead", tag("tr", top)), tag("tbody", body))
    label = f"Table of {', '.join(header)}"
    return tag("div", element, class_="scroll", role="region", aria_label=label, tabindex="0")


def _is_number(value: Cell) -> bool:
    if isinstance(value, Element):
        return False
    return not isinstance(value, str) or not value or _NUMBER.fullmatch(value) is not None


def _width_of(texts: Sequence[str]) -> int:
    """Returns the most bytes of a cell, which decrease if the texts of a table are many and long."""
    width = MAX_VALUE_LENGTH
    while sum(min(len(text), width) for text in texts) > MAX_TEXT // 3 and width > SHORT_TABLE:
        width //= 2
    return width


def _cell(value: Cell, width: int) -> Element | str | None:
    """Returns the content of a cell, with shortened text."""
    if value is None or isinstance(value, Element):
        return value
    return f"{value:,}" if isinstance(value, int) else shortened(str(value), width)


def _section(title: str, *parts: Element | None) -> Element | None:
    if all(part is None for part in parts):
        return None
    return tag("section", tag("h2", title), parts)


def _long_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Element | None:
    """Returns a table, collapsed if it is long, or None if it is empty."""
    if not rows:
        return None
    element = table(header, rows)
    return element if len(rows) <= SHORT_TABLE else _collapsed(f"{len(rows)} entries", element)


def _collapsed(title: str, content: Element) -> Element:
    return tag("details", tag("summary", title), content)


def _note_left_out(entries: Sequence[RecordGroups[Any]]) -> Element | None:
    left_out = sum(groups.left_out for groups in entries)
    return tag("p", f"{left_out:,} further ones are left out.", class_="note") if left_out else None


def _titled(title: str, run: Run, runs: Sequence[Run]) -> str:
    return f"{title} ({run.name})" if len(runs) > 1 else title


def _of(runs: Sequence[Run]) -> list[str]:
    return ["run"] if len(runs) > 1 else []


def _named(run: Run, runs: Sequence[Run]) -> list[Cell]:
    return [run.name] if len(runs) > 1 else []


def format_time(seconds: float) -> str:
    """Returns a time in seconds since the epoch as text."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_duration(seconds: float) -> str:
    """Returns a duration in seconds as text."""
    whole = max(round(seconds), 0)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    units = ((days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s"))
    first = next((index for index, (amount, _) in enumerate(units) if amount), 3)
    return " ".join(f"{amount} {unit}" for amount, unit in units[first : first + 2])
