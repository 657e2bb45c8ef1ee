"""What is known about this process among the others: plain facts, decided once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Which process this is, out of how many, and where the others meet.

    Attributes:
        rank: index of this process among all, from 0.
        size: number of processes on all machines.
        local_rank: index of this process on its machine, from 0.
        local_size: number of processes on this machine.
        node: index of this machine, from 0.
        address: where rank 0 can be reached; None for a single process.
        port: port at which rank 0 listens; None for a single process.
        started_by: name of the detector that recognised the process.
        needs_hosts: whether `local_rank`, `local_size` and `node` are not known yet: the ranks have to
            exchange host names.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    address: str | None = None
    port: int | None = None
    started_by: str = "nobody"
    needs_hosts: bool = False

    def variables(self) -> dict[str, str]:
        """Return these facts under the names that torch and others read; none for a single process."""
        if self.size == 1:
            return {}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": str(self.address),
            "MASTER_PORT": str(self.port),
        }
