"""The choice of the transport, its devices, the consensus of ranks, and errors of one rank on all."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.stand_ins.objects import CreatesFolder

from accelerate.base import CheckpointError, ConfigurationError, StateError
from accelerate.launch import KEY_VARIABLE
from accelerate.ops import Transport, current_transport, open_consensus, run_on_all_ranks, run_on_rank_0
from accelerate.ops.transport import CollectiveConsensus, supported_devices
from accelerate.state import Consensus, PartialState, StoreChannel, StoreConsensus, agreement, services


@pytest.mark.usefixtures("states")
def test_the_transport_is_decided_once_and_dropped_on_reset() -> None:
    first = current_transport()
    assert type(first) is Transport
    assert current_transport() is first
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    assert current_transport() is not first


@pytest.mark.usefixtures("states")
def test_copies_are_the_current_transport() -> None:
    transport = current_transport()
    assert copy.deepcopy(transport) is transport
    assert pickle.loads(pickle.dumps(transport)) is transport


def test_unpickling_without_a_state_opens_none() -> None:
    assert type(pickle.loads(pickle.dumps(Transport()))) is Transport
    assert PartialState._shared_state == {}


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call functions at the same time, one for each rank; what they return or raise."""
    found: list[Any] = [None] * len(calls)

    def call(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def ranks() -> list[StoreConsensus]:
    channel = StoreChannel(dist.HashStore(), "", {KEY_VARIABLE: "secret"})
    return [StoreConsensus(channel, rank, 3) for rank in range(3)]


def test_rank_0_decides_from_the_values_of_all_ranks(ranks: list[StoreConsensus]) -> None:
    for turn in range(4):
        said = [each.rank + turn for each in ranks]
        calls = [partial(each.decide, "call", mine, sum, 5.0) for each, mine in zip(ranks, said, strict=True)]
        assert together(*calls) == [sum(said)] * 3


def test_rank_0_waits_until_the_others_have_read_the_decision(ranks: list[StoreConsensus]) -> None:
    order = []

    class Late(StoreChannel):
        def wait(self, names: Sequence[str], timeout: float, find_lost: Any = list) -> dict[str, Any]:
            found = super().wait(names, timeout, find_lost)
            if names[0].endswith("decision"):
                time.sleep(0.2)
                order.append("read")
            return found

    def decide(consensus: StoreConsensus) -> None:
        consensus._channel = Late(consensus._channel._store, "", {})
        consensus.decide("call", None, len, 5.0)
        consensus.close()
        if consensus.rank == 0:
            order.append("ends")

    together(*(partial(decide, each) for each in ranks))
    assert order == ["read", "read", "ends"]


def test_rank_0_waits_a_limited_time_after_the_last_decision(
    ranks: list[StoreConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    together(*(partial(each.decide, "call", None, len, 5.0) for each in ranks))
    monkeypatch.setattr(agreement, "DECISION_TIMEOUT", 0.0)
    ranks[0].close()


def test_keys_of_earlier_decisions_are_deleted(ranks: list[StoreConsensus]) -> None:
    def decide(consensus: StoreConsensus) -> None:
        consensus.decide("call", None, len, 5.0)

    for _ in range(5):
        together(*(partial(decide, each) for each in ranks))
    assert ranks[0]._channel._store.num_keys() <= 10


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigurationError("mine"), ConfigurationError, "mine"),
        (
            OSError(13, "Permission denied"),
            CheckpointError,
            "Rank 0 failed for all ranks: .*Permission denied",
        ),
        (KeyError("x"), CheckpointError, "Rank 0 failed for all ranks: KeyError: 'x'"),
    ],
)
def test_an_error_of_the_decision_is_raised_on_all_ranks(
    ranks: list[StoreConsensus], error: Exception, kind: type[Exception], text: str
) -> None:
    def judge(said: list[Any]) -> None:
        raise error

    for raised in together(*(lambda each=each: each.decide("call", None, judge, 5.0) for each in ranks)):
        assert type(raised) is kind
        with pytest.raises(kind, match=text):
            raise raised


def test_a_missing_rank_is_named_after_the_timeout(
    ranks: list[StoreConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "DECISION_TIMEOUT", 0.05)
    with pytest.raises(StateError, match=r"`save` must be called on all .* process 0 did not arrive"):
        ranks[1].decide("save", None, len, 0.05)
    with pytest.raises(StateError, match=r"process 2 did not arrive within 0.05 s. .*is_main_process"):
        ranks[0].decide("save", None, len, 0.05)


def test_different_calls_raise_an_error_that_names_both(ranks: list[StoreConsensus]) -> None:
    raised = together(*(lambda each=each: each.decide(f"call {each.rank}", None, len, 5.0) for each in ranks))
    for error in raised:
        assert isinstance(error, StateError)
        assert "Process 0: call 0" in str(error)
        assert "Process 2: call 2" in str(error)


def test_a_lost_store_is_one_error(ranks: list[StoreConsensus], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(StoreChannel, "post", fail)
    with pytest.raises(StateError, match=r"store of the process group does not answer .*rank 0"):
        ranks[1].decide("save", None, len, 0.05)


class FakeTransport(Transport):
    """Two ranks; `other` is what the other rank answers."""

    def __init__(self, rank: int, other: Any = None) -> None:
        self.rank, self.size, self._other = rank, 2, other

    def gather_object(self, obj: Any) -> list[Any]:
        return [obj, self._other] if self.rank == 0 else [self._other, obj]

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        return obj if self.rank == 0 else self._other


def test_without_a_store_consensus_uses_collectives() -> None:
    assert CollectiveConsensus(FakeTransport(0, 5)).decide("call", 4, sum, 1.0) == 9
    assert CollectiveConsensus(FakeTransport(1, {"result": "said"})).decide("call", 4, sum, 1.0) == "said"
    with pytest.raises(StateError, match="no"):
        CollectiveConsensus(FakeTransport(1, {"error": "StateError", "text": "no"})).decide(
            "call", 4, sum, 1.0
        )
    assert not CollectiveConsensus(FakeTransport(0)).is_threaded


def test_open_consensus_selects_the_class_for_the_run() -> None:
    assert type(open_consensus(Transport(), None)) is Consensus
    assert type(open_consensus(FakeTransport(0), None)) is CollectiveConsensus
    assert type(open_consensus(FakeTransport(0), StoreChannel(dist.HashStore(), "", {}))) is StoreConsensus


@pytest.mark.parametrize("key", ["secret", ""])
@pytest.mark.parametrize("name", ["decision", "0", "2"])
def test_pickles_in_the_store_are_not_loaded(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "DECISION_TIMEOUT", 0.05)
    store = dist.HashStore()
    channel = StoreChannel(store, "", {KEY_VARIABLE: key})
    store.set(f"/1/{name}", pickle.dumps((True, CreatesFolder(tmp_path / "ran"))))
    with pytest.raises(StateError, match="must be called on all processes"):
        StoreConsensus(channel, 1, 3).decide("save", None, len, 0.05)
    with pytest.raises(StateError, match="must be called on all processes"):
        StoreConsensus(channel, 0, 3).decide("save", None, len, 0.05)
    assert not (tmp_path / "ran").exists()


def test_a_decision_with_another_signature_counts_as_absent(ranks: list[StoreConsensus]) -> None:
    unsigned = StoreChannel(ranks[0]._channel._store, "", {KEY_VARIABLE: "another"})
    unsigned.post("1/decision", {"result": "of another run"})
    unsigned.post("1/2", ["call", "of another run"])
    calls = [partial(each.decide, "call", each.rank, list, 5.0) for each in ranks]
    assert together(*calls) == [[0, 1, 2]] * 3


def fail() -> None:
    raise OSError(28, "No space left on device")


def refuse() -> None:
    raise ConfigurationError("mine")


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Any:
    services.put(Transport, FakeTransport(*request.param))
    yield
    services.reset()


@pytest.mark.parametrize("transport", [(0, ""), (1, "")], indirect=True)
def test_an_action_that_fails_here_is_one_error(transport: None) -> None:
    with pytest.raises(CheckpointError, match=r"^\[Errno 28\] No space left on device$"):
        run_on_all_ranks(fail)


@pytest.mark.parametrize("transport", [(0, "the disk is gone"), (1, "the disk is gone")], indirect=True)
def test_an_action_that_fails_on_another_rank_is_an_error_on_this_one(transport: None) -> None:
    with pytest.raises(CheckpointError, match="^the disk is gone$"):
        run_on_all_ranks(lambda: 5)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run_on_all_ranks(fail)


@pytest.mark.parametrize("transport", [(0,)], indirect=True)
def test_run_on_rank_0_returns_its_result_or_raises_its_error(transport: None) -> None:
    assert run_on_rank_0(lambda: 5) == 5
    with pytest.raises(ConfigurationError, match="^mine$"):
        run_on_rank_0(refuse)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run_on_rank_0(fail)


@pytest.mark.parametrize("transport", [(1, None)], indirect=True)
def test_other_ranks_do_nothing_when_rank_0_succeeds(transport: None) -> None:
    assert run_on_rank_0(fail) is None


@pytest.mark.parametrize("transport", [(1, ConfigurationError("mine"))], indirect=True)
def test_an_error_on_rank_0_is_raised_on_the_others(transport: None) -> None:
    with pytest.raises(ConfigurationError, match="^mine$"):
        run_on_rank_0(lambda: None)


@pytest.mark.parametrize(
    ("backends", "supported"),
    [
        ("cpu:gloo,cuda:gloo", {"cpu"}),
        ("cuda:nccl", {"cuda"}),
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}),
        ("cpu:mpi", {"cpu"}),
        ("npu:hccl", {"npu"}),
    ],
)
def test_a_transport_supports_the_devices_of_its_backends(backends: str, supported: set[str]) -> None:
    assert supported_devices(backends) == supported


class Second(Transport):
    """Process 1 of two; process 0 sends the numbers from 0."""

    size = 2
    rank = 1

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))


def test_a_transport_without_scatter_broadcasts_all_parts() -> None:
    out = torch.zeros(3)
    assert Second().scatter(None, out) is out
    assert out.tolist() == [3.0, 4.0, 5.0]
