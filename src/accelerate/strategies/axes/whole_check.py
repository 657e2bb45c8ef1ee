"""Comparison of a forward on shards of sequences with one on whole sequences, on each rank.

Attention exchanges heads for sequences, and everything else computes the positions of a rank. Code that
depends on several positions, such as a mean over a sequence, positions that are counted on each rank, or
attention that is not computed by a replaced function, computes something else. So before some forwards with
arguments of a kind, all ranks compute the outputs for the beginning of the sequences in both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError
from accelerate.ops import gather_in_group
from accelerate.precision import AutocastForward
from accelerate.strategies.axes.compared_forwards import (
    Computed,
    comparable,
    different_buffer,
    draw_of_whole,
    explain_draw,
    state_of_generators,
)
from accelerate.strategies.axes.counted_positions import Site, SitesOf
from accelerate.strategies.axes.sequence_inputs import Inputs, beginning, sharded
from accelerate.strategies.axes.sequence_shards import SequenceRanks, SequenceShards, divide
from accelerate.strategies.axes.sharded_forwards import ShardedForward, sequence_state
from accelerate.strategies.dtensors import units_of
from accelerate.strategies.tolerances import relative_difference, tolerance_of

Compute = Callable[..., Computed]
OutputDims = list[int | None]
"""Dimension of the positions in each tensor of the outputs, or None for a tensor without positions."""
POSITIONS = 512
"""Positions of each rank that are compared, unless the model needs longer sequences."""
EXACT = 2e-4
"""Largest relative difference in float32, in which the order of sums is the only one."""


class Result(NamedTuple):
    """Comparison on one rank.

    Attributes:
        difference: Largest relative difference of the outputs.
        other: Shapes of an output that is neither whole nor that of a shard, or None.
        num_attentions: Number of attention layers that exchanged heads.
        counts: Their numbers before each loss and before the end.
        own_error: Error of the forward on shards, or None.
        whole_error: Error of the forward on whole sequences, or None.
        inputs: Shapes and sums of the inputs.
        is_undefined: Whether a loss is NaN, as that of positions without labels.
        has_sites: Whether the forward on whole sequences counts to their length.
        is_counted: Whether places that count positions do so in each forward, and not for a cache.
        of_padding: Relative difference of outputs for padding before tokens, by positions that count it.
        others: Lengths of queries and keys that are not those of the sequences.
        buffer: Name of a buffer with other values, or "".
        attribute: Name of an attribute with other values, or "".
        unknown: Type of an object in the outputs whose tensors are not known, or "".
        draw: Draw of whole sequences on which the outputs depend, or "".
        states: Number of the state of the random generators.
    """

    difference: float = 0.0
    other: str | None = None
    num_attentions: int = 0
    counts: tuple[int, ...] = ()
    own_error: str | None = None
    whole_error: str | None = None
    inputs: Any = None
    is_undefined: bool = False
    has_sites: bool = False
    is_counted: bool = True
    of_padding: float = 0.0
    others: frozenset[int] = frozenset()
    buffer: str = ""
    attribute: str = ""
    unknown: str = ""
    draw: str = ""
    states: int = 0


class Checked(NamedTuple):
    """Forward that computes the same on shards as on whole sequences.

    Attributes:
        dims: Dimensions of outputs with positions.
        is_complete: Whether all outputs have been compared.
        sites: Places in the code that count positions.
        others: Lengths of queries and keys that are not those of the sequences.
        counts: Numbers of attention layers before each loss and before the end.
    """

    dims: OutputDims
    is_complete: bool
    sites: frozenset[Site]
    others: frozenset[int]
    counts: tuple[int, ...] = ()


class Comparison(NamedTuple):
    """Comparison on all ranks.

    Attributes:
        error: Error on whole sequences on this rank, or None.
        dims: Dimensions of outputs with positions.
        sites: Places in the code that count to the length of whole sequences.
        is_ambiguous: Whether the model attends to other tensors that are as long as the part of a rank.
    """

    results: list[Result]
    error: Exception | None
    dims: OutputDims
    sites: frozenset[Site]
    is_ambiguous: bool

    @property
    def others(self) -> frozenset[int]:
        """Lengths of queries and keys that are not those of the sequences."""
        return frozenset().union(*(each.others for each in self.results))


def check_forward(
    model: nn.Module,
    inputs: Inputs,
    complete: Callable[[Inputs, int], Inputs],
    shards: SequenceShards,
    dims: Mapping[str, int | None],
    precision: str,
) -> Checked:
    """Raises an error if a model computes other outputs on shards than on whole sequences.

    Called on all ranks of the group.

    Args:
        model: The model, of which only `forward` is called.
        inputs: Arguments with whole sequences, as the program gives them.
        complete: Returns arguments for a length with those that shards need.
        dims: Dimensions that the program gives.

    Raises:
        ConfigurationError: The outputs differ, or the ranks have different batches.
    """
    name, ranks = type(model).__name__, shards.ranks
    if precision in ("fp16", "bf16") and _has_autocast(model):
        precision = "no"  # in which smaller differences are found
    limit = _limit(model, precision)
    compare = partial(_compare_enough, model, inputs, complete, shards, dims, limit)
    compared, used = compare(frozenset()), frozenset[Site]()
    if all(each.has_sites for each in compared.results) and not _are_equal(compared.results, limit):
        counted = compare(compared.sites)
        if _are_equal(counted.results, limit):
            compared, used = counted, compared.sites
    results = compared.results
    _refuse_errors(name, ranks, compared)
    if compared.is_ambiguous:
        return Checked([], is_complete=False, sites=used, others=compared.others)
    _refuse_differences(name, ranks, results, limit)
    if max(each.of_padding for each in results) > limit:
        raise ConfigurationError(
            f"{name} derives positions from its attention_mask, which {ranks.sizes} does not. Pass "
            "position_ids with the positions of tokens, such as (attention_mask.cumsum(1) - 1).clamp(min=0)."
        )
    is_complete = not any(each.is_undefined for each in results)
    return Checked(compared.dims, is_complete, used, compared.others, results[0].counts)


def _compare_enough(
    model: nn.Module,
    inputs: Inputs,
    complete: Callable[[Inputs, int], Inputs],
    shards: SequenceShards,
    dims: Mapping[str, int | None],
    limit: float,
    sites: frozenset[Site],
) -> Comparison:
    """Compares the beginning of sequences, or whole sequences if it has no outputs."""
    ranks = len(shards.sizes)
    size = min(shards.length, ranks * POSITIONS + shards.length % ranks)
    compared = _compare(model, inputs, complete, shards, size, dims, limit, sites)
    if size < shards.length and (
        compared.is_ambiguous
        or any(each.own_error or each.whole_error or each.is_undefined for each in compared.results)
    ):
        compared = _compare(model, inputs, complete, shards, shards.length, dims, limit, sites)
    return compared


def _difference_of_padding(compute: Compute, entire: Inputs, completed: Inputs) -> float:
    """Returns how much the outputs for padding before tokens change with positions that count padding."""
    mask = entire.get("attention_mask")
    is_added = completed.has("position_ids") and not entire.has("position_ids")
    if not is_added or not isinstance(mask, Tensor) or mask.ndim != 2:
        return 0.0
    padded = mask.clone()
    padded[:, : mask.shape[1] // 2] = 0
    outputs = [
        compute(changed.args, changed.kwargs).outputs
        for changed in (
            inputs.map(lambda name, tensor: padded if name == "attention_mask" else tensor)
            for inputs in (entire, completed)
        )
    ]
    return max(map(_difference, *outputs), default=0.0)


def _limit(model: nn.Module, precision: str) -> float:
    """Returns the largest relative difference of the same outputs."""
    tolerance = tolerance_of(model, precision)
    multiplies_exactly = torch.get_float32_matmul_precision() == "highest"
    is_exact = tolerance == tolerance_of(nn.Module(), "no") and multiplies_exactly
    return EXACT if is_exact else tolerance.relative


def _are_equal(results: list[Result], limit: float) -> bool:
    return all(
        not (each.own_error or each.whole_error or each.other)
        and each.num_attentions
        and each.is_counted
        and each.difference <= limit
        and not each.buffer
        for each in results
    )


def _refuse_errors(name: str, ranks: SequenceRanks, compared: Comparison) -> None:
    results = compared.results
    if any(each.inputs != results[0].inputs for each in results):
        raise ConfigurationError(
            f"The {ranks.group.size()} ranks of {ranks.sizes} have different batches for {name}, and each "
            "computes a part of the sequences of one batch. Prepare the loader, whose batches are then equal "
            "on these ranks."
        )
    if compared.error is not None:
        raise compared.error
    own = next((each.own_error for each in results if each.own_error), None)
    entire = next((each.whole_error for each in results if each.whole_error), None)
    if own:
        raise ConfigurationError(
            f"{name} computes outputs on whole sequences, and raises an error on the positions of a rank of "
            f"{ranks.sizes} ({own}). Set {ranks.ones} for this model, or give the dimensions of its inputs "
            "in TorchSequenceParallelConfig(sequence_dims={...})."
        )
    if entire:
        raise ConfigurationError(
            f"{name} raises an error on whole sequences ({entire}), so {ranks.sizes} cannot be compared "
            f"with one rank. Train a model that takes whole sequences, or set {ranks.ones}."
        )


def _refuse_differences(name: str, ranks: SequenceRanks, results: list[Result], limit: float) -> None:
    if unknown := next((each.unknown for each in results if each.unknown), None):
        raise ConfigurationError(
            f"{name} returns an object of type {unknown}, whose tensors cannot be joined. Return tensors in "
            f"tuples, lists and dictionaries, or set {ranks.ones}."
        )
    if other := next((each.other for each in results if each.other), None):
        raise ConfigurationError(
            f"{name} returns {other}, so {ranks.sizes} cannot join it. Return one entry "
            f"for each position, or set {ranks.ones}."
        )
    if not all(each.num_attentions for each in results):
        raise ConfigurationError(
            f"The forward of {name} has not called an attention function that {ranks.sizes} replaces, or not "
            "with the positions of its inputs alone, so each rank would attend to its own positions only. "
            "Add tokens to the inputs of the model, and choose attention by scaled_dot_product_attention, "
            "for models of transformers by attn_implementation='sdpa', wrap "
            f"another function by accelerate.utils.sequence_parallel_attention, or set {ranks.ones}. A head "
            "is a part of the model whose attention it follows: prepare them as one module."
        )
    difference = max(each.difference for each in results)
    if difference > limit:
        raise ConfigurationError(
            f"{name} computes other outputs on the positions of a rank than on whole sequences (relative "
            f"difference {difference:.1e}), so {ranks.sizes} would train another model. Only attention by "
            "a replaced function may combine positions, and positions must be an argument of the model or "
            "torch.arange(length) in its forward. A loss other than cross_entropy or nll_loss of one label "
            f"for each position is computed from the outputs, outside of the model. Set {ranks.ones} for "
            "means over a sequence, pooled outputs and labels that the model shifts."
        )
    if buffer := next((each.buffer for each in results if each.buffer), None):
        raise ConfigurationError(
            f"{name} gives {buffer} other values with the positions of a rank than with whole "
            f"sequences, so {ranks.sizes} would train another model. Set {ranks.ones} for statistics over "
            "positions."
        )
    if attribute := next((each.attribute for each in results if each.attribute), None):
        raise ConfigurationError(
            f"{name} assigns other values to {attribute} with the positions of a rank than with whole "
            f"sequences, so code that reads it would compute something else. Return it as an output, or set "
            f"{ranks.ones}."
        )
    draw = next((each.draw for each in results if each.draw), None)
    if draw and len({each.states for each in results}) > 1:
        raise ConfigurationError(explain_draw(name, draw, ranks.sizes))


def _compare(
    model: nn.Module,
    inputs: Inputs,
    complete: Callable[[Inputs, int], Inputs],
    shards: SequenceShards,
    size: int,
    dims: Mapping[str, int | None],
    limit: float,
    sites: frozenset[Site],
) -> Comparison:
    """Compares the outputs for the first positions."""
    entire = beginning(inputs, shards.length, size, dims)
    completed = complete(entire, size)
    parts = divide(size, shards.ranks)
    own, positions = sharded(completed, parts, dims), completed.get("position_ids")
    forward = ShardedForward(parts, positions if isinstance(positions, Tensor) else None, sites)
    state, found, states = sequence_state(), OutputDims(), state_of_generators()
    state.depth += 1
    try:
        with torch.no_grad(), _without_autocast(model), comparable(model) as compute:
            expected, error, noted = _run_whole(compute, entire, size)
            text = None if error is None else f"{type(error).__name__}: {error}"
            result = Result(
                inputs=_summary(entire),
                whole_error=text,
                has_sites=bool(noted.found),
                others=frozenset(noted.others),
                states=states,
            )
            results = gather_in_group(result, shards.group)
            is_ambiguous = any(each.others & set(parts.sizes) for each in results)
            # An exchange between ranks with other shapes, or with one that has raised an error or exchanges
            # heads for other tensors, would hang.
            if not is_ambiguous and not any(
                each.whole_error or each.inputs != result.inputs for each in results
            ):
                computed, result, found = _run(compute, expected, own, forward, result, limit)
                if computed is not None:
                    draw = draw_of_whole(compute, (entire.args, entire.kwargs), expected, computed, limit)
                    result = result._replace(draw=draw)
                    result = result._replace(of_padding=_difference_of_padding(compute, entire, completed))
                results = gather_in_group(result, shards.group)
    finally:
        state.depth -= 1
    return Comparison(results, error, found, noted.found, is_ambiguous)


def _has_autocast(model: nn.Module) -> bool:
    """Returns whether mixed precision is that of autocast alone, and not of units of FSDP."""
    return isinstance(vars(model).get("forward"), AutocastForward) and not units_of(model)


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Lets a forward be that of the class of a model, in the dtype of its weights, inside the block."""
    if not _has_autocast(model):
        yield
        return
    forward = vars(model).pop("forward")
    try:
        yield
    finally:
        vars(model)["forward"] = forward


def _run_whole(compute: Compute, entire: Inputs, length: int) -> tuple[Computed, Exception | None, SitesOf]:
    """Returns the outputs for whole sequences or the error, and what the forward has noted."""
    state = sequence_state()
    before = state.set(None)
    try:
        with SitesOf(length) as noted:
            return compute(entire.args, entire.kwargs), None, noted
    except Exception as error:
        return Computed([], {}), error, noted
    finally:
        state.set(before)


def _run(
    compute: Compute, expected: Computed, own: Inputs, forward: ShardedForward, result: Result, limit: float
) -> tuple[Computed | None, Result, OutputDims]:
    """Compares the outputs for the positions of this rank with those for whole sequences."""
    state = sequence_state()
    before = state.set(forward)
    try:
        found = compute(own.args, own.kwargs, keeps=bool(forward.sites))
        forward.count_layers()
        result = result._replace(num_attentions=forward.num_attentions, counts=tuple(forward.counts))
        if forward.sites:
            again = ShardedForward(forward.shards, forward.positions, forward.sites)
            state.set(again)
            compute(own.args, own.kwargs)  # a cache of positions is not counted again
            is_counted = again.num_counted == forward.num_counted > 0 == forward.num_others
            result = result._replace(is_counted=is_counted)
    except ConfigurationError:
        raise
    except Exception as error:
        return None, result._replace(own_error=f"{type(error).__name__}: {error}"), []
    finally:
        state.set(before)
    result = result._replace(
        buffer=different_buffer(found, expected, limit),
        attribute=_different_attribute(found, expected, limit),
        unknown=expected.unknown,
    )
    return found, *_differences(found.outputs, expected.outputs, forward.shards, result)


def _different_attribute(own: Computed, right: Computed, limit: float) -> str:
    """Returns the name of an attribute without positions to which two forwards give other values, or ""."""
    for name, value in right.attributes.items():
        found = own.attributes.get(name)
        if found is not None and found.shape == value.shape and relative_difference(found, value, limit):
            return name
    return ""


def _differences(
    outputs: list[Tensor], expected: list[Tensor], shards: SequenceShards, result: Result
) -> tuple[Result, OutputDims]:
    """Returns the result of a comparison of outputs, and the dimensions of their positions."""
    if len(outputs) != len(expected):
        texts = f"{len(outputs)} tensors, and {len(expected)} for whole sequences"
        return result._replace(other=texts), []
    found: OutputDims = []
    for mine, right in zip(outputs, expected, strict=True):
        dim = _dim_of_positions(mine, right, shards)
        if dim is None and mine.shape != right.shape:
            return result._replace(
                other=f"an output of shape {list(mine.shape)}, and {list(right.shape)} for whole sequences"
            ), []
        found.append(dim)
        target = right if dim is None else shards.shard(right, dim)
        difference = max(result.difference, _difference(mine, target))
        is_undefined = result.is_undefined or (right.ndim == 0 and bool(right.isnan()))
        result = result._replace(difference=difference, is_undefined=is_undefined)
    return result, found


def _dim_of_positions(own: Tensor, entire: Tensor, shards: SequenceShards) -> int | None:
    """Returns the dimension in which outputs have the positions of a rank, or None for equal shapes."""
    if own.ndim != entire.ndim:
        return None
    dims = [dim for dim in range(own.ndim) if own.shape[dim] != entire.shape[dim]]
    if len(dims) != 1 or own.shape[dims[0]] != shards.own or entire.shape[dims[0]] != shards.length:
        return None
    return dims[0]


def _difference(own: Tensor, right: Tensor) -> float:
    """Returns the largest difference of a position, relative to the norm of all."""
    if not right.is_floating_point() or not right.numel():
        return 0.0 if own.shape != right.shape or right.ndim or own.equal(right) else float("inf")
    pair = (each.detach().to("cpu", torch.float64).nan_to_num(0.0) for each in (own, right))
    own, right = (each.reshape(-1, each.shape[-1] if each.ndim > 1 else 1) for each in pair)
    norm = float(right.norm(dim=-1).square().mean().sqrt())
    difference = float((own - right).norm(dim=-1).max())
    return difference / norm if norm else difference


def _summary(inputs: Inputs) -> list[Any]:
    """Returns shapes and sums of inputs, which are equal on ranks with the same batch."""
    return [
        (name, tuple(tensor.shape), float(tensor.detach().nan_to_num().double().sum()))
        for name, tensor in inputs.tensors()
    ]
