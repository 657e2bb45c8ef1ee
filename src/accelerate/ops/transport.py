"""The wire of this process: chosen once, and used by everything that talks to other processes."""

from __future__ import annotations

import copyreg
from collections.abc import Callable

from accelerate.ops.base import Transport as Transport
from accelerate.ops.flight_record import RecordingTransport
from accelerate.ops.wires import NeuronTransport, TorchTransport, XlaTransport, open_wire
from accelerate.state import PartialState, services


def current_transport() -> Transport:
    """Return the wire of this process, decided at the first call after `PartialState` was set up.

    It is a service of the run: a reset of `PartialState` forgets it. Without a state one is made.
    """
    transport = services.find(Transport)
    return _open_transport() if transport is None else transport


def _open_transport() -> Transport:
    state = PartialState()
    if state.num_processes == 1:
        transport = Transport()
    else:
        transport = RecordingTransport(open_wire(state.device_backend.name, state))
    return services.put(Transport, transport, uses_group=True)


def _transport_here() -> Transport:
    """The transport of this process; without a wire where no state was set up, as in a loader's worker."""
    return current_transport() if PartialState._shared_state else Transport()


def _stand_in(transport: Transport) -> tuple[Callable[[], Transport], tuple[()]]:
    return _transport_here, ()


# Copies and pickles of a transport stand for the transport of the process that reads them.
for _kind in (Transport, RecordingTransport, TorchTransport, NeuronTransport, XlaTransport):
    copyreg.pickle(_kind, _stand_in)
