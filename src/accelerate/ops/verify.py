"""Compare what the processes are about to do before they do it: a mismatch is an error, not a hang.

The comparison is always made where it costs next to nothing (it is part of the header with which collectives
of CPU tensors begin) and for every collective in debug mode (`ACCELERATE_DEBUG_MODE`). Only when the marks of
the processes differ do they exchange what each of them does, for the message. The result is the same on all
processes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from accelerate.base import AccelerateError
from accelerate.ops.base import Header, Transport
from accelerate.ops.flight_record import flight_recorder, recorded
from accelerate.ops.packing import mark_of, not_a_tensor
from accelerate.ops.transport import current_transport
from accelerate.state import PartialState

P = ParamSpec("P")
R = TypeVar("R")

# Where users import the operations from; messages name that module and not the file of a function.
PUBLIC_MODULE = "accelerate.utils.operations"


class DistributedOperationException(AccelerateError):
    """The processes gave a collective tensors that do not fit together; raised on every process."""


@dataclass(slots=True)
class Call:
    """What a refusal says of the call that a process makes."""

    operation: str
    arguments: str = ""  # those besides the data that must be the same on all processes
    data: Any = None
    rows_only: bool = False  # the first dimensions of the data may differ


class CallSummary(NamedTuple):
    """What one process sends to the others about its call when they disagree."""

    operation: str
    arguments: str
    compared: Any
    dtypes: Any
    shapes: Any
    location: str


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public collective: between several processes it is in the flight record of this one."""
    with_record = recorded(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (function if current_transport().size == 1 else with_record)(*args, **kwargs)

    return call


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that communicates, and whose first argument must have the same shapes everywhere.

    Args:
        function: Called on all ranks; its first argument is nested tensors.

    Returns:
        The function behind the check. The check is skipped on one process, and outside debug mode for
        collectives between devices.
    """
    first = next(iter(inspect.signature(function).parameters))
    path = _public_name(function)

    @operation
    @functools.wraps(function)
    def verified(*args: P.args, **kwargs: P.kwargs) -> R:
        transport = current_transport()
        if must_verify(transport) and (args or first in kwargs):
            verify_shapes(path, args[0] if args else kwargs[first], transport)
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate an operation that is made of other collectives, so that a refusal names it as well.

    Args:
        function: Called on all ranks.

    Returns:
        The function; a `DistributedOperationException` from inside it is raised again under its name.
    """
    path = _public_name(function)

    @operation
    @functools.wraps(function)
    def chained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"`{path}` could not be carried out. {error}") from error

    return chained


def debugging() -> bool:
    return bool(PartialState._shared_state.get("debug", False))


def must_verify(transport: Transport) -> bool:
    """Whether all tensors are compared before a collective, on whatever device they are."""
    return transport.size > 1 and (transport.verifies or debugging())


def checking_header(transport: Transport) -> Header:
    """The header of a transport; one that is gathered by way of the device where there is no other."""
    if transport.header is None:
        transport.header = Header(transport.size, lambda joined, sent: joined.copy_(transport.gather(sent)))
    return transport.header


def agree(transport: Transport, header: Header, mark: int, call: Call, length: int = 0) -> None:
    """Exchange headers, and raise on all processes unless all of them do the same; called on all ranks.

    `mark` identifies the operation and everything that has to be the same; `length` is the bytes of the
    payload of this process.
    """
    if not header.exchange(mark, length):
        summaries = transport.gather_object(tuple(summarize(call)))
        raise mismatch([CallSummary(*summary) for summary in summaries])


def verify_shapes(path: str, data: object, transport: Transport) -> None:
    """Raise on all processes unless `data` has the same structure, shapes and dtypes everywhere."""
    mark = mark_of(path, outline(data, _shape_of), outline(data, _dtype_of))
    agree(transport, checking_header(transport), mark, Call(path, data=data))


def outline(data: object, fact: Callable[[Tensor], Any]) -> Any:
    """Replace every tensor in nested data by a fact about it, every container by a plain list or dict."""
    if isinstance(data, Tensor):
        return fact(data)
    if isinstance(data, (list, tuple)):
        return [outline(item, fact) for item in data]
    if isinstance(data, Mapping):
        return {key: outline(value, fact) for key, value in data.items()}
    raise not_a_tensor(data)


def summarize(call: Call) -> CallSummary:
    """Describe a call to the other processes, with the line of the user that made it."""
    running = flight_recorder().running()
    location = f"{running.file}:{running.line}" if running is not None and running.file else "an unknown line"
    if call.data is None:
        return CallSummary(call.operation, call.arguments, None, None, None, location)
    shapes, dtypes = outline(call.data, _shape_of), outline(call.data, _dtype_of)
    compared = outline(call.data, lambda leaf: _shape_of(leaf)[1:]) if call.rows_only else shapes
    return CallSummary(call.operation, call.arguments, compared, dtypes, shapes, location)


def mismatch(summaries: Sequence[CallSummary]) -> DistributedOperationException:
    """Build the error for calls that do not fit together, of one summary for each process in rank order."""
    operations = {summary.operation for summary in summaries}
    if len(operations) > 1:
        reason = (
            "The processes are in different operations, and each of them waits for the others in its own."
        )
        fix = "Let all processes make the same calls in the same order: look for an `if` around these lines."
        rows = [_listed("Operation", [f"`{summary.operation}`" for summary in summaries])]
        has_shapes = any(summary.shapes is not None for summary in summaries)
        rows += [_listed("Input shapes", _shapes(summaries))] if has_shapes else []
    else:
        what, entries = _difference(summaries)
        reason = (
            f"The {what} differ between the processes, and this operation needs the same ones on all of them."
        )
        fix = (
            "Bring them together first: `gather(tensor, uneven=True)` joins tensors of different length, "
            "`pad_across_processes` makes tensors equally long, `gather_for_metrics` takes "
            "batches of different length, `gather_object` takes anything."
        )
        rows = [f"Operation: `{summaries[0].operation}`", _listed(f"Input {what}", entries)]
    rows.append(_listed("Called from", [summary.location for summary in summaries]))
    return DistributedOperationException("\n".join([f"{reason}\n", *rows, f"\n{fix}"]))


def _difference(summaries: Sequence[CallSummary]) -> tuple[str, list[Any]]:
    """What differs between calls of one operation, and what each process gave there."""
    first = summaries[0]
    if any(summary.arguments != first.arguments for summary in summaries):
        return "arguments", [summary.arguments for summary in summaries]
    same_shapes = all(summary.compared == first.compared for summary in summaries)
    if same_shapes and any(summary.dtypes != first.dtypes for summary in summaries):
        return "dtypes", [summary.dtypes for summary in summaries]
    return "shapes", _shapes(summaries)


def _shapes(summaries: Sequence[CallSummary]) -> list[Any]:
    return ["no tensors" if summary.shapes is None else summary.shapes for summary in summaries]


def _listed(title: str, entries: Sequence[Any]) -> str:
    return "\n".join([f"{title}:", *(f"  - Process {rank}: {entry}" for rank, entry in enumerate(entries))])


def _public_name(function: Callable[..., Any]) -> str:
    module = function.__module__
    if module.startswith(__package__ + "."):
        module = PUBLIC_MODULE
    return f"{module}.{function.__qualname__}"


def _shape_of(tensor: Tensor) -> list[int] | str:
    return "nested" if tensor.is_nested else list(tensor.shape)


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype)
