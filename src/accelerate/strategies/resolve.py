"""The one place that chooses the way of training."""

from __future__ import annotations

from accelerate.state.topology import Topology
from accelerate.strategies.base import Strategy
from accelerate.strategies.ddp import DataParallel
from accelerate.strategies.request import RunRequest
from accelerate.strategies.single import SingleProcess


def resolve(request: RunRequest, topology: Topology) -> type[Strategy]:
    """Return the strategy for a run.

    Args:
        request: what the run asks for.
        topology: how many processes there are.
    """
    return DataParallel if topology.size > 1 else SingleProcess
