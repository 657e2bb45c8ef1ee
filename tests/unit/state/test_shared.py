"""The dictionary that all instances of a state class share."""

import copy
import pickle
import threading
from typing import Any, ClassVar

import pytest

from accelerate.state import PartialState, ProcessServices, SharedState, ThreadLocalSharedDict, services


class Here(SharedState):
    _shared_state: ClassVar[dict[str, Any]] = {}


class PerThread(SharedState):
    _shared_state = ThreadLocalSharedDict()  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def empty() -> None:
    Here._shared_state.clear()


def test_instances_share_their_attributes() -> None:
    first, second = Here(), Here()
    assert not first.initialized
    first.colour = "red"
    assert second.colour == "red"
    assert second.initialized
    assert first.__dict__ is Here._shared_state
    first._shared_state["colour"] = "blue"
    assert second.colour == "blue"


def test_a_missing_attribute_raises_an_error_with_the_reason() -> None:
    state = Here()
    with pytest.raises(AttributeError, match="shared state is empty, most likely because `Here._reset_state"):
        _ = state.colour
    state.shape = "round"
    with pytest.raises(AttributeError, match="'Here' object has no attribute 'colour'$"):
        _ = state.colour
    assert getattr(state, "colour", None) is None


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_a_copy_shares_the_state(duplicate: Any) -> None:
    state = Here()
    state.lock = threading.Lock()  # neither copied nor pickled: only the handle is
    copied = duplicate(state)
    assert type(copied) is Here
    assert copied.__dict__ is Here._shared_state


class Known(SharedState):
    _shared_state: ClassVar[dict[str, Any]] = {}
    _pickled = ("colour", "shape")


def test_a_pickled_state_loads_its_attributes_in_a_process_without_a_state() -> None:
    state = Known()
    state.colour, state.lock = "red", threading.Lock()
    pickled = pickle.dumps(state)
    Known._shared_state.clear()
    loaded = pickle.loads(pickled)
    assert loaded.__dict__ == {"colour": "red"}
    assert not Known().initialized
    Known().colour = "blue"
    assert pickle.loads(pickled).colour == "blue"
    Known._shared_state.clear()


def test_each_thread_has_its_own() -> None:
    seen: list[dict[str, Any]] = []

    def replica(colour: str) -> None:
        state = PerThread()
        state.colour = colour
        seen.append(dict(PerThread._shared_state))

    for colour in ("red", "blue"):
        thread = threading.Thread(target=replica, args=[colour])
        thread.start()
        thread.join()
    assert seen == [{"colour": "red"}, {"colour": "blue"}]
    assert PerThread._shared_state == {}


def test_a_thread_local_dictionary_can_be_replaced() -> None:
    class Owner:
        _shared_state = ThreadLocalSharedDict(thread_local=True)

    owner = Owner()
    owner._shared_state = {"a": 1}
    assert Owner._shared_state == {"a": 1}


class Transport:
    """A service."""


class Note(Transport):
    """Another one."""


@pytest.fixture
def held() -> Any:
    services.reset()
    yield services
    services.reset()


def test_a_service_is_made_once_and_found_by_its_class(held: ProcessServices) -> None:
    assert held.find(Transport) is None
    transport = held.get(Transport, Note)
    assert type(transport) is Note
    assert held.get(Transport, Transport) is held.find(Transport) is transport
    assert held.find(Note) is None
    assert held.remove(Transport) is transport
    assert held.find(Transport) is held.remove(Transport) is None


def test_a_reset_of_the_state_removes_services_of_the_run_only(held: ProcessServices) -> None:
    transport, note = held.get(Transport, Transport), held.of_process(Note)
    PartialState._reset_state()
    assert held.get(Transport, Transport) is not transport
    assert held.of_process(Note) is note


def test_a_reset_of_the_state_ends_services(held: ProcessServices) -> None:
    ended: list[str] = []
    held.put(Note, Note(), end=lambda: ended.append("note"))
    held.put(Transport, Transport(), end=lambda: ended.append("transport"))
    held.remove(Note)
    PartialState._reset_state()
    PartialState._reset_state()
    assert ended == ["transport"]


def test_objects_that_use_the_process_group_are_removed_with_it(
    held: ProcessServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "group_owner", None)
    closed: list[str] = []
    transport = held.put(Transport, Transport(), uses_group=True)
    note = held.put(Note, Note(), close=lambda: closed.append("note"))
    held.before_close()
    assert closed == ["note"]
    assert held.find(Transport) is transport
    held.own_group()
    assert held.find(Transport) is None, "the next one uses the new group"
    assert held.find(Note) is note
    held.remove(Note)
    held.before_close()
    assert closed == ["note"]


def test_numbers_continue_after_a_reset(held: ProcessServices) -> None:
    purpose = "test_numbers_continue_after_a_reset"
    first = held.next_number(purpose)
    held.reset()
    assert held.next_number(purpose) == first + 1
    assert held.next_number(f"{purpose}, another one") == 0
