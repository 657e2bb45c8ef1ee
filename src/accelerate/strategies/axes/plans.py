"""Plans of tensor parallelism: which layers of a model are shared, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from accelerate.base import PreparationError, listed
from accelerate.logging import get_logger

logger = get_logger(__name__)

WHOLE = "replicate"
"""The style of modules that each rank has whole."""
CUT_IN_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "embedding_rowwise")
"""Styles that cut the first dimension of a weight: modules of these may share one."""


def _styles() -> dict[str, Callable[[], Any]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
        # of heads [batch, sequence, heads, features], each rank having its heads
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }


def plan_of(model: nn.Module) -> dict[str, Any]:
    """Return which modules of a model are shared, and how.

    Args:
        model: has a `tp_plan`: patterns of module names, in which `*` stands for one part, and for each a
            style: "colwise", "rowwise" and their kin, or one of torch's.

    Returns:
        Module name -> torch's style. Modules that share a parameter with one outside of the plan are left
        out: they are whole on each rank, which gives the same results.

    Raises:
        PreparationError: there is no plan, a style is unknown, or no module matches.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = type(model).__name__
    if plan and not isinstance(plan, Mapping):
        raise PreparationError(
            f"The tp_plan of {kind} is a {type(plan).__name__}: write patterns of module names with a style "
            "for each, such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
        )
    if not plan:
        raise PreparationError(
            f"{kind} does not say how its layers are shared between processes. Give it a plan before "
            "`prepare`, such as model.tp_plan = {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or "
            "set tp_size=1."
        )
    names = [name for name, _ in model.named_modules()]
    matched = {
        name: style
        for pattern, style in plan.items()
        if style != WHOLE
        for name in names
        if _matches(name, pattern)
    }
    if not matched:
        raise PreparationError(
            f"The tp_plan of {kind} fits none of its modules: {listed(list(plan))}. Write patterns of their "
            f"names, such as {listed([name for name in names if name][:3])}."
        )
    torn = _torn(model, matched)
    if torn:
        logger.info(f"{listed(torn)} share parameters with modules outside of the tp_plan and stay whole.")
    return {name: _style(kind, name, style) for name, style in matched.items() if name not in torn}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _style(kind: str, name: str, style: Any) -> Any:
    if not isinstance(style, str):
        return style
    styles = _styles()
    if style not in styles:
        raise PreparationError(
            f"The tp_plan of {kind} has {style!r} for {name}: the styles by name are {', '.join(styles)}. "
            "Use one of them, or a torch.distributed.tensor.parallel.ParallelStyle."
        )
    return styles[style]()


def _together(owners: list[str], matched: Mapping[str, Any]) -> bool:
    """Whether all owners of a parameter are cut in the same way: along their rows."""
    return all(matched.get(owner) in CUT_IN_ROWS for owner in owners)


def _torn(model: nn.Module, matched: Mapping[str, Any]) -> list[str]:
    """Return the matched modules that share a parameter with a module that is not."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), []).append(name)
    tied = [owners for owners in places.values() if len(owners) > 1]
    return [
        name for name in matched if any(name in owners and not _together(owners, matched) for owners in tied)
    ]
