"""Private parts of process groups, stores and the elastic agent.

The launcher, hang reports and retries after errors use them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def has_opened_group() -> bool:
    """Returns whether this process has opened a process group, which may be closed again."""
    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.distributed_c10d._default_pg_init_method is not None


def open_groups() -> list[dist.ProcessGroup]:
    """Returns all open process groups, of which torch has public access to the default one only."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


@contextmanager
def agent_hooks(
    start: Callable[[Any, Callable[[], None]], None], close: Callable[[int], None], size: Callable[[int], int]
) -> Iterator[None]:
    """Makes the elastic agent of torch start and end the processes of this node with functions of the caller.

    The agent waits for processes that do not respond, and has no public interface to end them otherwise.

    Args:
        start: Called with the context of the agent and the function that starts its processes.
        close: Called with the number of the signal. The agent then kills the remaining processes.
        size: Called before each rendezvous with the number of processes of this node. Returns the number that
            is started next.
    """
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    original = multiprocessing.SubprocessContext

    class HookedContext(original):  # type: ignore[misc, valid-type]
        def _start(self) -> None:
            start(self, super()._start)

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            # On Windows the agent uses CTRL_C_EVENT, 0, which cannot be sent to a single process.
            close(int(death_sig or signal.SIGTERM))
            if sys.platform == "win32":
                super()._close(signal.SIGTERM, timeout)  # ends a process immediately on Windows
            else:
                super()._close(signal.SIGKILL, timeout)

    rendezvous = SimpleElasticAgent._rendezvous

    def resize_and_meet(self: object, group: Any) -> None:
        group.spec.local_world_size = size(group.spec.local_world_size)
        rendezvous(self, group)

    multiprocessing.SubprocessContext = HookedContext  # type: ignore[misc]  # where the agent reads it
    SimpleElasticAgent._rendezvous = resize_and_meet  # type: ignore[method-assign]
    try:
        yield
    finally:
        multiprocessing.SubprocessContext = original  # type: ignore[misc]
        SimpleElasticAgent._rendezvous = rendezvous  # type: ignore[method-assign]


def default_to_stores_without_libuv() -> None:
    """Sets the default of `use_libuv` of `TCPStore` to False.

    Builds of torch for Windows have no libuv, and their elastic agent and `env://` do not pass the argument.
    """
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    original = store.__init__

    def open_store(self: object, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"use_libuv": False, **kwargs})

    store.__init__ = open_store


def num_collectives(group: Any) -> int | None:
    """Returns the number of collectives that this process has issued on a process group.

    Returns None for backends that are not part of torch, for which torch does not count them.
    """
    try:
        return int(group._get_sequence_number_for_group())
    except AttributeError:  # a torch without this method
        return None
    except RuntimeError as error:
        if "sequence number" in str(error):
            return None
        raise


def flatten_mesh(mesh: DeviceMesh, name: str) -> Any:
    """Returns a mesh with all dimensions flattened, which is registered in the root mesh with a name."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> Any:
    """Returns the mesh of which a mesh is a slice, or the mesh itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def skip_connection_messages(stage: Any) -> None:
    """Disables the messages that open the connections of a pipeline stage, which gloo opens by itself.

    Before torch 2.11 a rank sends 8 bytes and the other one expects 4, so gloo ends the process.
    """
    stage._get_init_p2p_neighbors_ops = list
