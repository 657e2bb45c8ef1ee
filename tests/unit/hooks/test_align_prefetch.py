"""One block ahead, in the order that was seen, and never more than two on the device."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerate.hooks import Prefetcher, StreamTransfer, Transfer, transfer_to

CPU = torch.device("cpu")


class FakeBlock:
    def __init__(self, name: str, log: list[tuple[str, bool]], size: int = 4) -> None:
        self.name, self.log, self.size = name, log, size
        self.problem: Exception | None = None

    def fetch(self, copy: Any = None) -> list[Tensor]:
        self.log.append((self.name, threading.current_thread() is threading.main_thread()))
        if self.problem is not None:
            raise self.problem
        return [torch.full((self.size,), float(ord(self.name)))]

    def count_bytes(self) -> int:
        return 4 * self.size


def take(prefetcher: Any, blocks: dict[str, FakeBlock], order: str) -> None:
    for name in order:
        (weight,) = prefetcher.take(blocks[name])
        assert weight[0] == ord(name)


def build(names: str) -> tuple[dict[str, FakeBlock], list[tuple[str, bool]]]:
    log: list[tuple[str, bool]] = []
    return {name: FakeBlock(name, log) for name in names}, log


def wait_for(prefetcher: Prefetcher) -> None:
    assert prefetcher._pending is not None
    prefetcher._pending[1].result()


def test_blocks_are_prefetched_in_the_order_of_the_first_forward() -> None:
    blocks, log = build("abc")
    prefetcher = Prefetcher(CPU)
    take(prefetcher, blocks, "abc")
    assert log == [(name, True) for name in "abc"]
    take(prefetcher, blocks, "a")
    wait_for(prefetcher)
    log.clear()
    take(prefetcher, blocks, "bc")
    wait_for(prefetcher)
    assert log == [("c", False), ("a", False)], "after the last block comes the first of the next forward"
    take(prefetcher, blocks, "abc")
    wait_for(prefetcher)
    assert [main for _, main in log].count(True) == 0


def test_another_order_of_blocks_is_correct_without_prefetching() -> None:
    blocks, log = build("abc")
    prefetcher = Prefetcher(CPU)
    take(prefetcher, blocks, "abcabc")
    wait_for(prefetcher)
    log.clear()
    take(prefetcher, blocks, "b")
    wait_for(prefetcher)
    assert log == [("b", True), ("c", False)], "a was expected, and is brought no more"
    take(prefetcher, blocks, "ab")
    wait_for(prefetcher)
    log.clear()
    take(prefetcher, blocks, "ab")
    wait_for(prefetcher)
    assert all(not main for _, main in log), "now a is what follows b"


def test_a_block_that_follows_itself_is_not_prefetched() -> None:
    blocks, log = build("a")
    prefetcher = Prefetcher(CPU)
    take(prefetcher, blocks, "aaa")
    assert log == [("a", True)] * 3
    assert "_worker" not in vars(prefetcher)


def test_an_error_is_that_of_the_block_that_has_it() -> None:
    blocks, _ = build("ab")
    prefetcher = Prefetcher(CPU)
    take(prefetcher, blocks, "aba")
    wait_for(prefetcher)
    take(prefetcher, blocks, "b")
    blocks["b"].problem = OSError("the disk is gone")
    take(prefetcher, blocks, "a")
    take(prefetcher, blocks, "a")  # what failed was for another block
    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher.take(blocks["b"])


def test_the_thread_ends_with_its_owner() -> None:
    blocks, _ = build("ab")
    before = set(threading.enumerate())
    prefetcher = Prefetcher(CPU)
    take(prefetcher, blocks, "abab")
    wait_for(prefetcher)
    (thread,) = set(threading.enumerate()) - before
    del prefetcher
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_copied_prefetcher_has_no_pending_copies() -> None:
    blocks, _ = build("ab")
    prefetcher = Prefetcher(CPU)
    take(prefetcher, blocks, "aba")
    wait_for(prefetcher)
    for copied in (copy.deepcopy(prefetcher), pickle.loads(pickle.dumps(prefetcher))):
        assert copied.device == CPU
        assert copied._pending is None
        assert "_worker" not in vars(copied)


# Accelerators, with a module that records what is asked of it


class FakeModule:
    """What `torch.cuda` does, as far as it is used."""

    def __init__(self, free: int = 1000, held: int = 0) -> None:
        self.free, self.held = free, held
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> Any:
        self.log.append(f"new stream on {device}")
        return SimpleNamespace(record_event=lambda: self.log.append("record") or "event")

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.log.append(f"wait for {event}"))

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2000

    def memory_reserved(self, device: torch.device) -> int:
        return self.held

    def memory_allocated(self, device: torch.device) -> int:
        return 0


def test_weights_are_copied_on_their_own_stream() -> None:
    blocks, _ = build("ab")
    module = FakeModule()
    prefetcher = Prefetcher(torch.device("cuda", 0), lambda device: StreamTransfer(device, module))
    take(prefetcher, blocks, "aba")
    wait_for(prefetcher)
    assert module.log == ["new stream on cuda:0", "enter", "record", "leave"]
    take(prefetcher, blocks, "b")
    assert "wait for event" in module.log
    wait_for(prefetcher)


@pytest.mark.parametrize(("free", "held", "goes"), [(15, 0, False), (16, 0, True), (6, 10, True)])
def test_nothing_is_prefetched_without_free_memory(free: int, held: int, goes: bool) -> None:
    blocks, log = build("ab")
    module = FakeModule(free, held)
    prefetcher = Prefetcher(torch.device("cuda", 0), lambda device: StreamTransfer(device, module))
    take(prefetcher, blocks, "aba")
    wait_for(prefetcher)
    log.clear()
    take(prefetcher, blocks, "b")
    wait_for(prefetcher)
    assert (("b", True) in log) is not goes


def test_running_out_of_memory_ahead_is_no_error() -> None:
    blocks, _ = build("ab")
    blocks["b"].problem = torch.OutOfMemoryError("full")
    transfer = StreamTransfer(torch.device("cuda", 0), FakeModule())
    assert transfer.fetch(blocks["b"]) is None


def test_accelerators_with_streams_copy_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(transfer_to(CPU)) is Transfer
    assert type(transfer_to(torch.device("meta"))) is Transfer
    for module, kind in ((FakeModule(), StreamTransfer), (SimpleNamespace(), Transfer)):
        monkeypatch.setattr(torch, "cuda", module)
        assert type(transfer_to(torch.device("cuda", 0))) is kind
