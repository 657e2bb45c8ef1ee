"""A report of records with any values is a page of a bounded size, in which all text is escaped."""

from __future__ import annotations

import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st

from accelerate.report import read_run, summarize, write_page

TEXT = st.one_of(
    st.text(max_size=20), st.sampled_from(["<script>x</script>", "\ud800", "\0", "</style><b>", "\"'"])
)
NUMBER = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324]))
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBER, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
STEP = st.one_of(st.integers(-5, 1000), st.integers(), st.booleans())
TIME = st.one_of(st.floats(0, 2e9), NUMBER)
NUMBERS = st.dictionaries(st.one_of(TEXT, st.sampled_from(["data", "rest", "least", "7"])), ANY, max_size=4)
SETTING = st.fixed_dictionaries({"name": ANY, "value": ANY, "source": ANY})
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "start": {
        "rank": STEP,
        "world_size": STEP,
        "script": TEXT,
        "pid": STEP,
        "attempt": STEP,
        "device": TEXT,
        "device_name": TEXT,
        "argv": st.lists(ANY, max_size=2),
        "versions": NUMBERS,
        "settings": st.lists(SETTING, max_size=2),
    },
    "steps": {
        "first": STEP,
        "last": STEP,
        "seconds": NUMBER,
        "seconds_by": NUMBERS,
        "memory": STEP,
        "peak_memory": STEP,
        "samples": STEP,
        "values": NUMBERS,
    },
    "values": {"step": st.one_of(st.none(), STEP), "values": NUMBERS},
    "checkpoint": {
        "event": TEXT,
        "path": TEXT,
        "step": STEP,
        "seconds": NUMBER,
        "blocked": NUMBER,
        "size": STEP,
        "text": TEXT,
    },
    "event": {"name": st.one_of(TEXT, st.just("config")), "step": STEP, "text": TEXT},
    "ranks": {"first": STEP, "last": STEP, "compute": NUMBERS, "slowest": STEP, "slow": NUMBERS},
    "conclusion": {"name": TEXT, "step": STEP, "text": TEXT},
    "end": {"how": st.sampled_from(["finished", "failed", "stopped", "<b>"]), "error": TEXT, "digest": TEXT},
}
KINDS = {
    kind: st.fixed_dictionaries({"kind": st.just(kind), "time": TIME, **fields})
    for kind, fields in FIELDS.items()
}
RECORDS = st.lists(st.tuples(st.integers(0, 2), st.one_of(*KINDS.values())), min_size=1, max_size=25)


class Tags(HTMLParser):
    """Collects the names of elements, and of attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}


@settings(max_examples=100)
@given(records=RECORDS, copies=st.integers(1, 2))
def test_any_records_give_a_page(records: list[tuple[int, dict[str, Any]]], copies: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, record in records:
            with open(Path(folder, f"rank-{rank:05}.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        runs = [read_run(Path(folder), f"run {copy}") for copy in range(copies)]
    page = write_page(runs)
    tags = Tags(page)
    assert (tags.names.count("script"), tags.names.count("b")) == (1, 0)
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert page.encode("utf-8")
    json.dumps([summarize(run) for run in runs], allow_nan=False, default=str)
