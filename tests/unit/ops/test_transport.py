"""The choice of the transport, and its copies."""

from __future__ import annotations

import copy
import pickle

import pytest

from accelerate.ops import Transport, current_transport
from accelerate.state import PartialState


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
