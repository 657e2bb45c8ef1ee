"""Values of a run with replica groups, which the launcher passes to their processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accelerate.base import ConfigurationError, RecoveryError, environ
from accelerate.settings import decode
from accelerate.settings.sections import RecoverySection

STORE_VARIABLE = "ACCELERATE_RUN_STORE"
"""Variable with the address of the store of the run."""
SETTINGS = ("replicas", "min_replicas", "replica_batch", "replica_timeout", "lighthouse")


class Run(NamedTuple):
    """Values that the launcher passes to the processes of a replica group.

    Attributes:
        replica: Index of the replica group.
        min_replicas: Smallest number of them that takes a step.
        batch: Whether the global batch is "constant", or "shrink" with the number of members.
        timeout: Timeout of one collective between them, in seconds.
        lighthouse: Address of the lighthouse.
        store: Host and port of the store of the run.
    """

    replica: int
    replicas: int
    min_replicas: int
    batch: str
    timeout: int
    lighthouse: str
    store: str

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Run:
        """Reads the values from environment variables.

        Raises:
            ConfigurationError: The launcher did not set one of them.
        """
        settings = decode(RecoverySection, variables)
        missing = [f"ACCELERATE_{name.upper()}" for name in SETTINGS if getattr(settings, name) is None]
        if STORE_VARIABLE not in variables:
            missing.append(STORE_VARIABLE)
        if missing:
            raise ConfigurationError(
                f"{environ.REPLICA} is set and {', '.join(missing)} is not. Start replica groups with "
                "accelerate launch --replicas."
            )
        replicas, min_replicas, batch, timeout, lighthouse = (getattr(settings, name) for name in SETTINGS)
        number, store = int(variables[environ.REPLICA]), variables[STORE_VARIABLE]
        return cls(number, replicas, min_replicas, batch, timeout, lighthouse, store)

    def connect(self) -> Any:
        host, _, port = self.store.rpartition(":")
        try:
            return TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        except dist.DistError as error:
            reason = " ".join(str(error).split())
            raise RecoveryError(
                f"The store of the run at {self.store} is not reachable: {reason} Check that accelerate "
                "launch runs on machine 0."
            ) from error
