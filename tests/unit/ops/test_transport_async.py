"""Numbers combined beside the default process group; several processes are in tests/distributed."""

from __future__ import annotations

import pytest

from accelerate.ops import reduce_async
from accelerate.ops.transport import AsyncGroup
from accelerate.state import PartialState, services

pytestmark = pytest.mark.usefixtures("states")


def test_reduce_async_of_one_process_returns_its_numbers() -> None:
    PartialState(cpu=True)
    assert reduce_async([1, 2.5, 2.0**53], "sum", "test").wait() == [1.0, 2.5, 2.0**53]
    assert services.find(AsyncGroup) is None
