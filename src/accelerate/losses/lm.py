"""Cross entropy of the logits of a head, with their gradients, without a tensor of all logits.

`Accelerator.lm_loss` and models changed by `use_lm_loss` call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf, prod
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError, wrong_value
from accelerate.devices import of_device
from accelerate.losses.heads import FIX, Head, compute_in_units, matrices_of, read_head, refuse_shards
from accelerate.losses.statistics import Statistics, Vocabulary, compute_statistics, slice_size_of
from accelerate.ops import is_dtensor
from accelerate.parallelism_config import Data, axes_with
from accelerate.strategies import sequence_state, whole_losses

Reduction = Literal["mean", "sum"]


class Sequences(NamedTuple):
    """Ranks that have other tokens of the same sequences.

    Attributes:
        groups: Their process groups, one for each dimension of the mesh that shards sequences.
        factor: Number of these ranks over which the backward pass averages gradients, or 1 if it adds them.
    """

    groups: tuple[Any, ...] = ()
    factor: float = 1.0


WHOLE = Sequences()
"""Ranks of sequences that are not sharded."""


def ranks_of_sequences(mesh: Any, replicas: int, size: int) -> Sequences:
    """Returns the ranks that have other tokens of the sequences of this rank.

    Args:
        mesh: Device mesh of the run, or None.
        replicas: Number of ranks over which the backward pass averages gradients.
        size: Number of all ranks.
    """
    dimensions: Sequence[str] = () if mesh is None else mesh.mesh_dim_names
    names = [name for name in axes_with(Data.SEQUENCES) if name in dimensions and mesh[name].size() > 1]
    if not names:
        return WHOLE
    count = prod(mesh[name].size() for name in names)
    return Sequences(tuple(mesh[name].get_group() for name in names), count * replicas / size)


def lm_loss(
    hidden: Tensor,
    head: nn.Module | Tensor,
    labels: Tensor,
    *,
    shift: bool = False,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    slice_size: int | None = None,
    sequences: Sequences = WHOLE,
    models: Sequence[nn.Module] = (),
) -> tuple[Tensor, Tensor]:
    """Returns the loss and the log-probabilities of labels, see `Accelerator.lm_loss`.

    Args:
        sequences: Ranks that have other tokens of the same sequences.
        models: Models whose units of FSDP 2 may have the weights of the head.
    """
    _check_options(shift, reduction, label_smoothing, z_loss, scale, soft_cap, slice_size)
    parts = read_head(head)
    hidden, labels = _replicated(hidden), _replicated(labels)
    _check_shapes(hidden, labels, parts)
    labels = labels.long()  # uint8 has no ignore_index
    if shift and labels.numel():
        labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if not parts.units:
        _check_units(parts, hidden, models)
    targets = labels.reshape(-1)
    is_valid = targets != ignore_index
    _check_labels(targets, is_valid, parts.vocabulary_size)
    vocabulary = partial(
        Vocabulary,
        scale=float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        sums_logits=label_smoothing > 0,
    )
    tokens = hidden.reshape(-1, parts.in_features)
    statistics = compute_in_units(
        parts.units, tokens, lambda tokens: _statistics_of(parts, tokens, targets, vocabulary, slice_size)
    )
    in_range = (targets >= 0) & (targets < parts.vocabulary_size)
    logps = statistics.target - statistics.log_sum_exp
    logps = torch.where(is_valid, torch.where(in_range, logps, torch.nan), 0)
    losses = -logps
    if label_smoothing:
        uniform = statistics.log_sum_exp - statistics.total / parts.vocabulary_size
        losses = losses.lerp(uniform, label_smoothing)
    if z_loss:
        losses = losses + z_loss * statistics.log_sum_exp.square()
    loss = torch.where(is_valid, losses, 0).sum()
    return _reduced(loss, targets, ignore_index, reduction, sequences), logps.reshape(labels.shape)


def _replicated(tensor: Any) -> Tensor:
    """Returns a tensor itself, or the whole tensor of a DTensor."""
    whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole


def _statistics_of(
    head: Head, tokens: Tensor, targets: Tensor, vocabulary: Any, slice_size: int | None
) -> Statistics:
    """Returns the statistics of tokens of shape (N, features), while the weights of the head are gathered."""
    products, bias, first, group = matrices_of(head, tokens)
    dtypes = tuple(_dtype_of(inputs, weight) for inputs, weight in products)
    accumulation = torch.float64 if torch.float64 in dtypes else torch.float32
    size = slice_size or slice_size_of(tokens.shape[0], head.in_features)
    entries = vocabulary(dtypes, accumulation, slice_size=size, first=first, group=group)
    return compute_statistics(targets, products, bias, entries)


def _dtype_of(inputs: Tensor, weight: Tensor) -> torch.dtype:
    """Returns the dtype in which `torch.nn.functional.linear` multiplies inputs and a weight."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (inputs.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    if inputs.dtype != weight.dtype:
        raise wrong_value(
            "hidden",
            inputs.dtype,
            f"the head has weights of {weight.dtype}, and there is no autocast",
            f"Pass hidden.to({weight.dtype}), or choose a mixed precision",
        )
    return weight.dtype


def _reduced(
    loss: Tensor, targets: Tensor, ignore_index: int, reduction: Reduction, sequences: Sequences
) -> Tensor:
    """Returns the sum of losses, or their mean over the labels of all ranks with the same sequences."""

    def reduce_own(target: Tensor, ignore_index: int, reduction: Reduction) -> Tensor:
        if reduction == "sum":
            return loss
        count = (target != ignore_index).sum()
        for group in sequences.groups:
            dist.all_reduce(count, group=group)
        mean = loss * sequences.factor / count.clamp(min=1)
        # Without labels the mean is NaN, as that of torch, and the gradient 0.
        return torch.where(count > 0, mean, torch.nan)

    arguments = {"target": targets, "ignore_index": ignore_index, "reduction": reduction}
    if sequence_state().forward is None:  # torch.compile cannot trace what comes after
        return reduce_own(targets, ignore_index, reduction)
    return whole_losses.cross_entropy(reduce_own, (), arguments)


def _check_options(
    shift: bool,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    scale: float,
    soft_cap: float | None,
    slice_size: int | None,
) -> None:
    """Raises an error for a wrong option."""
    if not isinstance(shift, bool):
        raise wrong_value(
            "shift",
            shift,
            "labels are the tokens at the positions of `hidden`, or the tokens after them",
            "Pass shift=True for labels as models of transformers take them, which the loss then shifts, or "
            "shift=False for one label of each position, as torch's cross_entropy takes them",
        )
    if reduction not in get_args(Reduction):
        fix = "Pass one of them; return_logps=True returns the log-probability of each label"
        raise wrong_value("reduction", reduction, 'it is "mean" or "sum"', fix)
    bounds = {
        "label_smoothing": (label_smoothing, 0 <= label_smoothing <= 1, "at least 0 and at most 1"),
        "z_loss": (z_loss, 0 <= z_loss < inf, "finite and not negative"),
        "scale": (scale, 0 < abs(scale) < inf, "finite and not 0"),
        "soft_cap": (soft_cap, soft_cap is None or 0 < soft_cap < inf, "positive, or None for no cap"),
        "slice_size": (slice_size, slice_size is None or slice_size >= 1, "1 or more, or None"),
    }
    for name, (value, is_right, allowed) in bounds.items():
        if not is_right:
            raise wrong_value(name, value, f"it is {allowed}", f"Pass a number that is {allowed}")


def _check_shapes(hidden: Tensor, labels: Tensor, head: Head) -> None:
    """Raises an error for hidden states and labels that do not fit each other or the head."""
    shape, size = list(hidden.shape), head.in_features
    if not hidden.ndim or shape[-1] != size:
        reason = f"the head has weights of shape {[head.vocabulary_size, size]}"
        raise wrong_value("hidden", shape, reason, f"Pass hidden states of shape (..., {size})")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise wrong_value("labels", labels.dtype, "they are indices of the vocabulary", "Pass integers")
    if list(labels.shape) != shape[:-1]:
        reason = f"the hidden states have shape {shape}, and each has one label"
        raise wrong_value("labels", list(labels.shape), reason, f"Pass labels of shape {shape[:-1]}")
    if labels.device != hidden.device:
        reason = f"the hidden states are on {hidden.device}"
        raise wrong_value("labels", labels.device, reason, "Move the labels there")
    if not labels.ndim:
        raise wrong_value("labels", shape[:-1], "there is no dimension of tokens", "Pass hidden[None]")


def _check_labels(targets: Tensor, is_valid: Tensor, size: int) -> None:
    """Raises an error for labels outside of the vocabulary on the CPU, where their values are known.

    On other devices, which would have to be waited for, the loss is NaN.
    """
    is_unknown = torch.compiler.is_compiling() or torch_private.is_fake(targets)
    if is_unknown or not of_device(targets.device).is_host:
        return
    wrong = targets[is_valid & ((targets < 0) | (targets >= size))]
    if wrong.numel():
        reason = f"the vocabulary has {size} entries"
        raise wrong_value(
            "labels",
            int(wrong[0]),
            reason,
            "Pass indices below that, or ignore_index for tokens without a label",
        )


def _check_units(head: Head, hidden: Tensor, models: Iterable[nn.Module]) -> None:
    """Raises an error for weights that FSDP 2 has not gathered, or whose gradients it would not reduce."""
    parameters = list(head.parameters())
    is_frozen = not (hidden.requires_grad and torch.is_grad_enabled())
    if not any(map(is_dtensor, parameters)) and not is_frozen:
        return
    phases = torch_private.phases_of_fsdp2(models)
    for parameter in parameters:
        is_gathered, runs = phases.get(parameter, (True, True))
        if not is_gathered:
            raise refuse_shards(parameter)
        if not runs and is_frozen and parameter.requires_grad and torch.is_grad_enabled():
            raise PreparationError(
                "The hidden states need no gradient, so FSDP does not reduce the gradient of the head "
                f"outside of the forward of the model. {FIX}."
            )
