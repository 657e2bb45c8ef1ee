"""Runs of scripts whose start is not what is tested: in forked ranks, which spares launcher and imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..distributed.conftest import end, rank_server
from .scripts import run_script

__all__ = ["end", "rank_server"]


@pytest.fixture
def run_ranks(end: Callable[..., Any]) -> Callable[..., str]:
    """Run a script with options on two ranks, in an empty folder; what both wrote, if they ended well."""

    def run_ranks(script: Path, *options: str) -> str:
        ended = end(run_script, str(script), *options, timeout=240)
        printed = "\n".join(ended.outputs)
        assert ended.codes == [0, 0], printed
        return printed

    return run_ranks
