"""The page: what it shows of one run and of two, its charts, its size, and that all text is escaped."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from accelerate.base import convert_bytes
from accelerate.monitoring import (
    PHASES,
    Checkpoint,
    Conclusion,
    End,
    Event,
    RecordWriter,
    Setting,
    Start,
    Values,
    Window,
)
from accelerate.report import (
    Line,
    Series,
    conclusion_text,
    draw_lines,
    format_number,
    read_run,
    render,
    tag,
    ticks,
    write_page,
)

from .recorded_run import BEGIN, DIGEST, STEPS, write_run

HOSTILE = (
    "</title></style></script><script>window.injected=1</script><img src=x onerror=window.injected=1>\"'&amp;"
)


class Reader(HTMLParser):
    """Collects the text, the elements and the attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def page_of(*folders: Path, **kwargs: float) -> Reader:
    return Reader(write_page([read_run(folder) for folder in folders], **kwargs))


def test_a_page_shows_the_events_of_a_failed_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    page = page_of(tmp_path / "run", now=BEGIN + STEPS + 60)
    for text in (
        DIGEST,
        "A rank failed.",
        "1 restart",
        "rank 1 is 33 % slower since step 100",
        "mixed_precision",
        "--mixed_precision",
        "init_trackers",
        "train.py",
        "2.13.0",
        "no space left",
        "rank 1 waits for rank 0",
        "the disk is slow",
        "verified",
        "committed",
        "Share of each phase, rank 0",
        "accuracy",
    ):
        assert text in page.text, text
    assert page.tags.count("svg") == 7
    assert any(name == "aria-label" and "2 not finite" in str(value) for name, value in page.attributes)


def test_a_run_without_an_end_has_the_time_of_its_last_record(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run" / "run_records", 0)
    writer.write(Start(time=BEGIN, rank=0, world_size=1, pid=1))
    writer.close()
    text = page_of(tmp_path / "run", now=BEGIN + 90).text
    assert "still running, or killed" in text
    assert "1 min 30 s before this page" in text


def test_values_alone_have_the_last_step_of_the_run(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run_records", 0)
    writer.write(Values(time=BEGIN, step=1234, values={"loss": 1.0}))
    writer.close()
    assert "1 rank; step 1,234" in page_of(tmp_path).text


def test_two_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", is_failed=False)
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert "Failure (a)" in page.text
    assert "Failure (b)" not in page.text
    assert "value (a)" in page.text
    assert any(name == "data-label" and value == "b" for name, value in page.attributes)


def test_settings_that_differ_come_first_and_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", text="x")
    page = write_page([read_run(tmp_path / "a"), read_run(tmp_path / "b")])
    rows = re.findall(r"<tr( class=\"differs\")?><td>([^<]*)</td>", page.split("Configuration")[1])
    marks = [bool(mark) for mark, name in rows if name in ("batch_size", "num_processes")]
    assert marks == [True, False]


def test_all_text_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "a<b onclick=x>&"
    write_run(folder, text=HOSTILE)
    plain, hostile = tmp_path / "plain", page_of(folder)
    write_run(plain)
    assert hostile.tags == page_of(plain).tags
    assert HOSTILE in hostile.text
    names = {name for name, _ in hostile.attributes}
    assert not [name for name in names if name.startswith("on")]
    assert names & {"src", "srcset", "action", "style"} == set()
    assert {value for name, value in hostile.attributes if name == "href"} == {"data:,"}


def test_a_page_contains_no_control_characters_or_half_characters() -> None:
    page = render(tag("p", "a\0b\ud800c\x1b[0m\u202e", title="\x07"))
    assert page == '<!doctype html>\n<p title="\ufffd">a\ufffdb\ufffdc\ufffd[0m\ufffd</p>'


@pytest.mark.slow
@pytest.mark.parametrize("steps", [500, 1500])
def test_a_large_run_stays_below_three_megabytes(tmp_path: Path, steps: int) -> None:
    for rank in range(16):
        writer = RecordWriter(tmp_path / "run_records", rank)
        for step in range(1, steps):
            seconds_by = dict.fromkeys(PHASES, 0.123 * (step % 13))
            window = Window(
                time=BEGIN,
                first=step,
                last=step,
                seconds=1.0 + step % 7,
                seconds_by=seconds_by,
                memory=step**2,
            )
            values = {f"value {name}": math.sin(step * name) for name in range(300)} if step % 10 == 0 else {}
            writer.write(window, Values(time=BEGIN, step=step, values=values))
        writer.close()
    assert len(write_page([read_run(tmp_path)])) < 3_000_000


def test_long_texts_stay_below_three_megabytes(tmp_path: Path) -> None:
    long = "x" * 100_000
    settings = [Setting(name=f"{number}{long}", value=long, source=long) for number in range(50)]
    writer = RecordWriter(tmp_path / "run_records", 0)
    start = Start(time=BEGIN, rank=0, world_size=1, script=long, pid=1, device=long, settings=settings)
    texts = [f"{number}{long}" for number in range(50)]
    writer.write(start, *(Event(time=BEGIN, name="hang", step=1, text=text) for text in texts))
    writer.write(*(Values(time=BEGIN, step=1, values={text: 1.0, f"{text} text": text}) for text in texts))
    writer.write(*(Checkpoint(time=BEGIN, event="failed", path=text, step=1, text=text) for text in texts))
    writer.write(*(End(time=BEGIN, how="failed", error=text, digest=text) for text in texts))
    writer.close()
    page = write_page([read_run(tmp_path)])
    assert len(page) < 3_000_000
    assert long[:15_000] in page


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (1, 300, [100, 200, 300]),
        (5, 5, [5]),
        (-1e308, 1e308, [-1e308]),
        (0, 5e-324, [0]),
    ],
)
def test_ticks_are_round_values(least: float, most: float, expected: list[float]) -> None:
    assert ticks(least, most, 4) == expected


def test_a_chart_breaks_at_a_value_that_is_not_finite_and_marks_it() -> None:
    series = Series()
    for step, value in enumerate([1.0, 2.0, math.nan, 3.0, 4.0]):
        series.add(step, value)
    chart = draw_lines("loss", [Line("rank 0", series)], format_number)
    assert chart is not None
    line = chart.find("svg/path[@data-label='rank 0']")
    mark = chart.find("svg/path[@class='invalid']")
    assert line is not None
    assert line.attrib["d"].count("M") == 2
    assert mark is not None
    assert mark.attrib["d"].count("M") == 1


@pytest.mark.parametrize("values", [[math.nan], [1e308], [-1e308, 1e308], [5e-324, 0.0], [math.inf, 1.0]])
def test_extreme_values_give_coordinates_within_the_chart(values: list[float]) -> None:
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    chart = draw_lines("loss", [Line("rank 0", series)], format_number)
    assert chart is not None
    paths = [path.attrib["d"] for path in chart.iter("path") if "line" in path.attrib["class"]]
    numbers = [
        float(number) for path in paths for number in re.findall(r"[-\w.]+", re.sub("[MLHVhlz]", " ", path))
    ]
    assert all(0 <= number <= 400 for number in numbers)


@pytest.mark.parametrize(("values", "is_dot"), [([3.0], True), ([3.0, math.nan], True), ([3.0, 4.0], False)])
def test_a_single_value_is_a_dot(values: list[float], is_dot: bool) -> None:
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    chart = draw_lines("loss", [Line("rank 0", series)], format_number)
    assert chart is not None
    assert ('class="line dot c0"' in render(chart)) == is_dot


def test_memory_has_round_ticks_in_its_unit() -> None:
    series = Series()
    series.add(1, 1.1 * 2**20)
    series.add(2, 3.9 * 2**20)
    chart = draw_lines("memory", [Line("rank 0", series)], convert_bytes, 1024.0)
    assert chart is not None
    assert [text.text for text in chart.iter("text") if "up" in text.attrib["class"]] == ["2.0 MB", "3.0 MB"]


def test_a_conclusion_is_shown_without_its_name_at_the_beginning() -> None:
    text = "blocking saves: training waits: 20 %"
    named = Conclusion(time=1.0, name="blocking-saves", step=1, text=text)
    assert conclusion_text(named) == "training waits: 20 %"
    assert conclusion_text(replace(named, name="data-bound")) == text


def test_a_chart_without_values_is_left_out() -> None:
    assert draw_lines("memory", [Line("rank 0", Series())], convert_bytes) is None


def luminance(color: str) -> float:
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colors_can_be_read_in_both_modes(mode: int) -> None:
    style = (files("accelerate.report") / "page.css").read_text(encoding="utf-8")
    colors = dict(re.findall(r"--(\w+): (#\w{6})", style.split("prefers-color-scheme: dark")[mode]))
    lines = {f"s{index}" for index in range(8)}
    texts = {"text", "note", "good", "bad", "warn"}
    assert colors.keys() == {"back", "panel", "edge"} | texts | lines
    for name in texts | lines:
        for back in ("back", "panel"):
            light, dark = sorted((luminance(colors[name]), luminance(colors[back])), reverse=True)
            least = 4.5 if name in texts else 3.0  # of WCAG: for text, and for parts of a chart
            assert (light + 0.05) / (dark + 0.05) >= least, (name, back)


TEXTS: dict[str, dict[str, object]] = {
    "start": {"rank": 0, "world_size": 1, "pid": 1, "device_name": ""},
    "values": {"step": 1, "values": {}},
    "checkpoint": {"event": "", "path": "", "step": 1, "text": ""},
    "event": {"name": "", "step": 1, "text": ""},
    "conclusion": {"name": "", "step": 1, "text": ""},
    "end": {"how": "failed", "error": "", "digest": ""},
}
"""Records of each kind with text that a run can choose; empty values are filled."""


@pytest.mark.parametrize("letter", ["x", "&", "漢"])
@pytest.mark.parametrize("shape", [(1, 1_000_000), (320, 3_000)], ids=["one", "many"])
@pytest.mark.parametrize("kind", [*TEXTS, "config"])
def test_records_with_texts_of_any_size_stay_below_three_megabytes(
    kind: str, shape: tuple[int, int], letter: str, tmp_path: Path
) -> None:
    count, length = shape
    lines = []
    for number in range(count):
        text = f"{number}{letter * length}"
        fields = {name: text if value == "" else value for name, value in TEXTS.get(kind, {}).items()}
        if kind == "start":
            setting = {"name": text, "value": text, "source": text}
            settings = [{**setting, "name": f"{each}{text}"} for each in range(3)]
            fields |= {"argv": [text, text], "versions": {text: text}, "settings": settings}
        if kind == "values":
            fields["values"] = {text: 1.0, f"{text} text": text}
        if kind == "config":
            fields = {"name": "config", "step": 1, "text": json.dumps({text: text})}
        lines.append(json.dumps({"kind": "event" if kind == "config" else kind, "time": 1.0, **fields}))
    (tmp_path / "rank-00000.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert len(write_page([run]).encode()) < 1_500_000
    assert len(write_page([run, run]).encode()) < 3_000_000


def test_items_and_flops_have_charts_and_columns(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "run_records", 0)
    writer.write(Start(time=BEGIN, rank=0, world_size=1, pid=1))
    for step in (1, 2):
        flops = {"items": 100.0, "flops_per_second": 4e14, "mfu": 0.404}
        writer.write(Window(time=BEGIN, first=step, last=step, seconds=1.0, seconds_by={}, **flops))  # type: ignore[arg-type]
    writer.close()
    page = page_of(tmp_path)
    for text in (
        "items per second, of all ranks",
        "TFLOP/s",
        "model FLOPs utilization",
        "MFU",
        "400",
        "40.4%",
    ):
        assert text in page.text, text
