"""Values in the store: JSON, signed, and absent where no rank of this run has signed them."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from accelerate.launch import KEY_VARIABLE
from accelerate.state import StoreChannel, as_dataclass

KEY = {KEY_VARIABLE: "secret"}


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.mark.parametrize("environ", [KEY, {}])
@pytest.mark.parametrize("value", [0, "text", True, [1, [2.5, "a"]], {"a": {"b": []}}, "\N{SNOWMAN}"])
def test_posted_values_are_read_unchanged(store: HashStore, environ: dict[str, str], value: Any) -> None:
    first, second = StoreChannel(store, "part", environ), StoreChannel(store, "part", environ)
    assert second.read("name") is None
    first.post("name", value)
    assert second.read("name") == value
    assert second.wait(["name", "other"], 0.01) == {"name": value, "other": None}
    assert second.wait(["name"], 1.0) == {"name": value}
    second.remove("name")
    assert first.read("name") is None


def test_values_that_are_no_json_are_refused(store: HashStore) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        StoreChannel(store, "part", KEY).post("name", object())


def test_decide_keeps_the_first_value(store: HashStore) -> None:
    first, second = StoreChannel(store, "part", KEY), StoreChannel(store, "part", KEY)
    assert first.decide("name", "mine") == "mine"
    assert second.decide("name", "late") == "mine"
    assert second.read("name") == "mine"
    assert [first.count("number", 2), second.count("number")] == [2, 2]


def test_waiting_returns_available_values_at_the_timeout(store: HashStore) -> None:
    channel = StoreChannel(store, "part", KEY)
    channel.post("here", 1)
    assert channel.wait(["here", "missing"], 0.02) == {"here": 1, "missing": None}
    assert channel.wait(["here"], 0.0) == {"here": 1}


def test_ctrl_c_ends_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.state.agreement.MAX_WAIT", 0.2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = StoreChannel(store, "test", {})
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            channel.wait(["missing"], 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 30.0
    channel.post("here", 1)
    assert channel.wait(["here"], 1.0) == {"here": 1}  # the connection still works


@pytest.mark.slow
def test_a_value_of_more_than_8_megabytes_arrives() -> None:
    value = [["layers", number, [4096, 4096], "bfloat16"] for number in range(300_000)]
    assert len(json.dumps(value)) > 1 << 23
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = StoreChannel(store, "test", {KEY_VARIABLE: "secret"})
    channel.post("name", value)
    assert channel.wait(["name"], 5.0) == {"name": value}


def test_lists_keep_the_order_and_what_this_run_has_signed(store: HashStore) -> None:
    first, second = StoreChannel(store, "part", KEY), StoreChannel(store, "part", KEY)
    assert second.read_list("names") == []
    first.append("names", "a\nb")
    store.append("part/names", "forged\n")
    StoreChannel(store, "part", {}).append("names", "of another run")
    second.append("names", {"c": 1})
    assert first.read_list("names") == ["a\nb", {"c": 1}]


def test_reading_what_is_absent_sets_nothing(store: HashStore) -> None:
    channel = StoreChannel(store, "part", KEY)
    assert [channel.read("name"), channel.read_list("name")] == [None, []]
    assert store.num_keys() == 0


def test_several_values_are_posted_and_gathered_at_once(store: HashStore) -> None:
    channel = StoreChannel(store, "part", KEY)
    channel.post_all({f"topic/{rank}": rank * 2 for rank in (0, 3, 4)})
    expected = {rank: rank * 2 if rank in (0, 3, 4) else None for rank in range(6)}
    assert channel.gather("topic", range(6), 0.01) == expected


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"null",
        json.dumps({"ends": True}).encode(),
        b"0" * 64 + b"1",
        b"\xff" * 80,
        StoreChannel(HashStore(), "part", {})._encode("name", 1),
        StoreChannel(HashStore(), "part", {KEY_VARIABLE: "another"})._encode("name", 1),
        StoreChannel(HashStore(), "part", KEY)._encode("another name", 1),
        StoreChannel(HashStore(), "another part", KEY)._encode("name", 1),
    ],
)
def test_unsigned_values_are_absent(
    store: HashStore, forged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    channel = StoreChannel(store, "part", KEY)
    store.set("part/name", forged)
    assert channel.read("name") is None
    assert channel.wait(["name"], 0.02) == {"name": None}
    assert caplog.text.count("a value that none of its ranks has written (part/name): it is ignored") == 1
    channel.post("name", "ours")
    assert channel.read("name") == "ours"


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff", b"", b"z", b"zz"])
def test_without_a_key_broken_values_are_absent_too(store: HashStore, body: bytes) -> None:
    channel = StoreChannel(store, "part", {})
    assert not channel.is_signed
    store.set("part/name", channel._signature("name", body) + body)
    assert channel.read("name") is None


@dataclass
class Message:
    text: str
    number: int
    share: float
    ranks: list[int]


def test_only_a_fitting_dictionary_becomes_a_dataclass() -> None:
    good = {"text": "a", "number": 1, "share": 2, "ranks": [0, 1]}
    assert as_dataclass(Message, good) == Message("a", 1, 2, [0, 1])
    wrong: list[Any] = [None, [], "text", {}, {**good, "more": 1}]
    others: list[Any] = [{"text": 1}, {"number": True}, {"number": "1"}, {"ranks": ["0"]}]
    wrong += [{**good, **other} for other in others]
    assert [as_dataclass(Message, each) for each in wrong] == [None] * len(wrong)
