"""Several cases of a distributed test in one start of its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.state import AcceleratorState, GradientState


def call_for_each(function: Callable[..., Any], cases: Sequence[Any]) -> list[Any]:
    """Return the result of a function for each case, with new states for each of them.

    Args:
        function: is called on each rank with the case, or with its elements if the case is a tuple.
        cases: the cases, in the order of the calls.
    """
    found = []
    for case in cases:
        try:
            found.append(function(*case) if isinstance(case, tuple) else function(case))
        except Exception as error:
            raise AssertionError(f"the case {case!r} failed") from error
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return found
