"""Compare what the processes hand to a collective before it starts: a mismatch is an error, not a hang.

The comparison is always made where it costs little (tensors on the CPU) and on every wire in debug mode
(`ACCELERATE_DEBUG_MODE`). Each process sends one number that stands for its shapes; only when the numbers
differ are the shapes themselves exchanged, for the message. All processes come to the same verdict.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from accelerate.base.errors import AccelerateError
from accelerate.ops.base import Transport
from accelerate.ops.record import RING, describe
from accelerate.ops.transport import current_transport
from accelerate.state import PartialState

P = ParamSpec("P")
R = TypeVar("R")

# Where users import the operations from; messages name that place and not the file a function lives in.
_PUBLIC_MODULE = "accelerate.utils.operations"


class DistributedOperationException(AccelerateError):
    """The processes gave a collective tensors that do not fit together; raised on every process."""


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a collective whose first argument must have the same shapes and dtypes on every process.

    Args:
        function: Called on all ranks; its first argument is nested tensors.

    Returns:
        The function behind the check. The check is skipped on one process, and on device wires outside debug
        mode.
    """
    first = next(iter(inspect.signature(function).parameters))
    operation, name = _public_name(function), function.__name__

    @functools.wraps(function)
    def verified(*args: P.args, **kwargs: P.kwargs) -> R:
        transport = current_transport()
        if transport.size == 1 or not (args or first in kwargs):
            return function(*args, **kwargs)
        data = args[0] if args else kwargs[first]
        RING.begin(name, describe(data))
        try:
            if must_verify(transport):
                verify_shapes(operation, data, transport)
            return function(*args, **kwargs)
        finally:
            RING.end()

    return verified


def chained_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate an operation that is made of other collectives, so that a refusal names it as well.

    Args:
        function: Called on all ranks.

    Returns:
        The function; a `DistributedOperationException` from inside it is raised again under its name.
    """
    operation, name = _public_name(function), function.__name__

    @functools.wraps(function)
    def chained(*args: P.args, **kwargs: P.kwargs) -> R:
        RING.begin(name, describe(args[0]) if args else None)
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"`{operation}` could not be carried out. {error}") from error
        finally:
            RING.end()

    return chained


def must_verify(transport: Transport) -> bool:
    """Whether shapes are compared before a collective on this wire."""
    return transport.size > 1 and (transport.verifies or bool(PartialState._shared_state.get("debug", False)))


def verify_shapes(
    operation: str, data: object, transport: Transport, *, lengths_differ: bool = False
) -> None:
    """Raise on all processes unless `data` has the same structure, shapes and dtypes everywhere.

    Args:
        operation: The import path to name in the message.
        data: Nested tensors.
        transport: The wire; called on all ranks.
        lengths_differ: The first dimensions may differ.

    Raises:
        DistributedOperationException: With the input of each process.
        TypeError: A leaf is not a tensor.
    """
    compared = outline(data, _row_shape_of if lengths_differ else _shape_of)
    dtypes = outline(data, _dtype_of)
    if all_agree((compared, dtypes), transport):
        return
    inputs = transport.gather_object((compared, dtypes, outline(data, _shape_of)))
    what, index = ("dtypes", 1) if all(entry[0] == compared for entry in inputs) else ("shapes", 2)
    raise mismatch(operation, what, [entry[index] for entry in inputs])


def outline(data: object, fact: Callable[[Tensor], Any]) -> Any:
    """Replace every tensor in nested data by a fact about it, every container by a plain list or dict.

    Raises:
        TypeError: A leaf is not a tensor.
    """
    if isinstance(data, Tensor):
        return fact(data)
    if isinstance(data, (list, tuple)):
        return [outline(item, fact) for item in data]
    if isinstance(data, Mapping):
        return {key: outline(value, fact) for key, value in data.items()}
    raise TypeError(
        f"A collective takes tensors in lists, tuples and dictionaries, and was given {type(data).__name__}: "
        "use `gather_object` or `broadcast_object_list` for other objects."
    )


def all_agree(facts: object, transport: Transport) -> bool:
    """Whether `facts` reads the same on all processes; eight bytes travel for each of them.

    Args:
        facts: Anything whose `repr` says what matters.
        transport: The wire; called on all ranks.
    """
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    mark = int.from_bytes(digest, "little", signed=True)
    marks: list[int] = transport.gather(torch.tensor([mark])).tolist()
    return all(other == mark for other in marks)


def mismatch(operation: str, what: str, inputs: list[Any]) -> DistributedOperationException:
    """Build the error for inputs that do not fit together.

    Args:
        operation: The import path of the refused function.
        what: What differs: "shapes" or "dtypes".
        inputs: One entry for each process, in rank order.
    """
    lines = "\n".join(f"  - Process {rank}: {entry}" for rank, entry in enumerate(inputs))
    return DistributedOperationException(
        f"The {what} differ between the processes, and this operation needs the same ones on all of them.\n\n"
        f"Operation: `{operation}`\n"
        f"Input {what}:\n{lines}\n\n"
        "Bring them together first: `pad_across_processes` makes tensors equally long, `gather_for_metrics` "
        "takes batches of different length, `gather_object` takes anything."
    )


def _public_name(function: Callable[..., Any]) -> str:
    module = function.__module__
    if module.startswith(__package__ + "."):
        module = _PUBLIC_MODULE
    return f"{module}.{function.__qualname__}"


def _shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _row_shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape[1:])


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype)
