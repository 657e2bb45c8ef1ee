"""What a forked or spawned worker does before the user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.base import ConfigurationError, DistributedType, environ

RENDEZVOUS_FILE = "ACCELERATE_DEBUG_RDV_FILE"


class PrepareForLaunch:
    """A function made ready for `torch.multiprocessing`: called with the index of its process first.

    Args:
        launcher: the user's function.
        distributed_type: how the processes train; with `DistributedType.XLA` the ranks are XLA's business.
        debug: use a file as store (``ACCELERATE_DEBUG_RDV_FILE``) instead of a port.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Tell this process its rank, then call the function.

        Args:
            index: of this process on its machine, from 0.
            *args: for the function.
        """
        if self.debug:
            _meet_over_file(index)
        elif self.distributed_type != DistributedType.NO and self.distributed_type != DistributedType.XLA:
            first = environ.get_int_from_env(["NODE_RANK"], 0) * environ.get_int_from_env(["NPROC"], 1)
            environ.assign({"LOCAL_RANK": str(index), "RANK": str(first + index)})
        environ.assign({"FORK_LAUNCHED": "1"})
        self.launcher(*args)


def _meet_over_file(index: int) -> None:
    import torch.distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    path = environ.current().get(RENDEZVOUS_FILE)
    if not path:
        raise ConfigurationError(
            f"{RENDEZVOUS_FILE} is not set: a debug launch meets over that file. Set it to a path."
        )
    size = environ.get_int_from_env(["WORLD_SIZE"], 1)
    torch.distributed.init_process_group(
        backend="gloo", rank=index, store=FileStore(path, size), world_size=size
    )
