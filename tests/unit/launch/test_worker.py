from __future__ import annotations

import pytest

from accelerate.base import ConfigurationError, clear_environment, current, patch_environment
from accelerate.launch import PrepareForLaunch

NAMES = ("LOCAL_RANK", "RANK", "FORK_LAUNCHED")


def seen_by_worker(index: int, kind: str, **variables: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    with clear_environment(), patch_environment(**variables):
        PrepareForLaunch(lambda *args: seen.update(current()), kind)(index, "x")
    return {name: seen[name] for name in NAMES if name in seen}


def test_a_worker_knows_its_rank() -> None:
    seen = seen_by_worker(1, "MULTI_CPU", NODE_RANK="2", NPROC="4")
    assert seen == {"LOCAL_RANK": "1", "RANK": "9", "FORK_LAUNCHED": "1"}


@pytest.mark.parametrize("kind", ["NO", "XLA"])
def test_other_kinds_set_no_rank(kind: str) -> None:
    assert seen_by_worker(1, kind) == {"FORK_LAUNCHED": "1"}


def test_a_debug_worker_needs_its_file() -> None:
    with clear_environment(), pytest.raises(ConfigurationError, match="ACCELERATE_DEBUG_RDV_FILE is not set"):
        PrepareForLaunch(print, debug=True)(0)
