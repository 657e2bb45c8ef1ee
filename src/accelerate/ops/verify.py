"""Comparison of the calls of all ranks before a collective, so that a mismatch is an error and not a hang.

Collectives of CPU tensors are always compared, as part of the header that precedes them, and all others in
debug mode (`ACCELERATE_DEBUG_MODE`). Ranks exchange summaries of their calls for the error message only if
their fingerprints differ. All ranks raise the same error. The module also has the decorators of the public
collectives.
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
from accelerate.ops.packing import fingerprint_of, not_a_tensor
from accelerate.ops.transport import current_transport
from accelerate.state import PartialState

P = ParamSpec("P")
R = TypeVar("R")

# Module from which users import the operations, for the names in messages.
PUBLIC_MODULE = "accelerate.utils.operations"


class DistributedOperationException(AccelerateError):
    """Error for calls of a collective that differ between ranks, raised on all ranks."""


@dataclass(slots=True)
class Call:
    """Call of a collective on this rank, for the error message after a mismatch."""

    operation: str
    arguments: str = ""  # arguments besides the data that must be equal on all ranks
    data: Any = None
    rows_only: bool = False  # whether the first dimension of the data may differ between ranks


class CallSummary(NamedTuple):
    """Summary of the call of one rank, which ranks exchange after a mismatch."""

    operation: str
    arguments: str
    compared: Any
    dtypes: Any
    shapes: Any
    location: str


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public collective, which the flight recorder records if there are several processes."""
    with_record = recorded(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (function if current_transport().size == 1 else with_record)(*args, **kwargs)

    return call


def verify_operation(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a collective whose first argument must have equal shapes and dtypes on all ranks.

    Args:
        function: Function that is called on all ranks, and whose first argument is nested tensors.

    Returns:
        The function with a check before each call. The check is skipped with a single process, and outside
        of debug mode for collectives between devices.
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
    """Decorates an operation that consists of other collectives, so that errors name it as well.

    Args:
        function: Function that is called on all ranks.

    Returns:
        The function. A `DistributedOperationException` inside it is raised again with its name.
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


def is_debug_mode() -> bool:
    return bool(PartialState._shared_state.get("debug", False))


def must_verify(transport: Transport) -> bool:
    """Returns whether calls are compared before a collective for tensors on all devices."""
    return transport.size > 1 and (transport.verifies or is_debug_mode())


def checking_header(transport: Transport) -> Header:
    """Returns the header of a transport, which is created and gathered over the device if it has none."""
    if transport.header is None:
        transport.header = Header(transport.size, lambda joined, sent: joined.copy_(transport.gather(sent)))
    return transport.header


def compare_calls(
    transport: Transport, header: Header, fingerprint: int, call: Call, length: int = 0
) -> None:
    """Exchanges headers, and raises an error on all ranks unless all fingerprints are equal.

    Called on all ranks.

    Args:
        fingerprint: Identifies the operation and all values that must be equal.
        length: Bytes of the payload of this rank.
    """
    if not header.exchange(fingerprint, length):
        summaries = transport.gather_object(tuple(summarize(call)))
        raise mismatch_error([CallSummary(*summary) for summary in summaries])


def verify_shapes(path: str, data: object, transport: Transport) -> None:
    """Raises an error on all ranks unless `data` has equal structure, shapes and dtypes on all ranks."""
    fingerprint = fingerprint_of(path, map_leaves(data, _shape_of), map_leaves(data, _dtype_of))
    compare_calls(transport, checking_header(transport), fingerprint, Call(path, data=data))


def map_leaves(data: object, function: Callable[[Tensor], Any]) -> Any:
    """Replaces tensors in nested data by the results of a function, and containers by lists and dicts."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, (list, tuple)):
        return [map_leaves(item, function) for item in data]
    if isinstance(data, Mapping):
        return {key: map_leaves(value, function) for key, value in data.items()}
    raise not_a_tensor(data)


def summarize(call: Call) -> CallSummary:
    """Returns the summary of a call, with the line of user code that made it."""
    running = flight_recorder().running()
    location = f"{running.file}:{running.line}" if running is not None and running.file else "an unknown line"
    if call.data is None:
        return CallSummary(call.operation, call.arguments, None, None, None, location)
    shapes, dtypes = map_leaves(call.data, _shape_of), map_leaves(call.data, _dtype_of)
    compared = map_leaves(call.data, lambda leaf: _shape_of(leaf)[1:]) if call.rows_only else shapes
    return CallSummary(call.operation, call.arguments, compared, dtypes, shapes, location)


def mismatch_error(summaries: Sequence[CallSummary]) -> DistributedOperationException:
    """Returns the error for calls that differ, from one summary for each rank in rank order."""
    operations = {summary.operation for summary in summaries}
    if len(operations) > 1:
        reason = (
            "The processes are in different operations, and each of them waits for the others in its own."
        )
        fix = "Let all processes make the same calls in the same order: look for an `if` around these lines."
        rows = [_format_list("Operation", [f"`{summary.operation}`" for summary in summaries])]
        has_shapes = any(summary.shapes is not None for summary in summaries)
        rows += [_format_list("Input shapes", _shapes(summaries))] if has_shapes else []
    else:
        kind, entries = _difference(summaries)
        reason = (
            f"The {kind} differ between the processes, and this operation needs the same ones on all of them."
        )
        fix = (
            "Bring them together first: `gather(tensor, uneven=True)` joins tensors of different length, "
            "`pad_across_processes` makes tensors equally long, `gather_for_metrics` takes "
            "batches of different length, `gather_object` takes anything."
        )
        rows = [f"Operation: `{summaries[0].operation}`", _format_list(f"Input {kind}", entries)]
    rows.append(_format_list("Called from", [summary.location for summary in summaries]))
    return DistributedOperationException("\n".join([f"{reason}\n", *rows, f"\n{fix}"]))


def _difference(summaries: Sequence[CallSummary]) -> tuple[str, list[Any]]:
    """Returns the kind of difference between calls of one operation, and the value of each rank."""
    first = summaries[0]
    if any(summary.arguments != first.arguments for summary in summaries):
        return "arguments", [summary.arguments for summary in summaries]
    same_shapes = all(summary.compared == first.compared for summary in summaries)
    if same_shapes and any(summary.dtypes != first.dtypes for summary in summaries):
        return "dtypes", [summary.dtypes for summary in summaries]
    return "shapes", _shapes(summaries)


def _shapes(summaries: Sequence[CallSummary]) -> list[Any]:
    return ["no tensors" if summary.shapes is None else summary.shapes for summary in summaries]


def _format_list(title: str, entries: Sequence[Any]) -> str:
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
