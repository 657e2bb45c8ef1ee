"""Micro-batches of a pipeline, and losses and outputs of their batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelerate import rng, torch_private
from accelerate.base import ConfigurationError, PreparationError, StateError, listed, wrong_value
from accelerate.strategies.batches import LossFunction, arguments_of, loss_of
from accelerate.strategies.pipeline.nested_tensors import flatten, tensors_in


class MicroBatch(NamedTuple):
    """Part of a batch.

    Attributes:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        target: Second argument of the loss function.
        size: Number of samples.
        weight: Weight of its loss in that of the batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    weight: float


WholeSizes = dict[tuple[str, int, int], set[int]]
"""Sizes that a tensor of a batch, by its place and number of dimensions, has had besides that of samples."""


def split_batch(
    values: object, count: Callable[[int], int], whole_sizes: WholeSizes
) -> tuple[list[Any], list[int]]:
    """Returns parts of nested values along their first dimension, and the number of samples of each.

    Args:
        values: Nested tensors of which those with the size of the first one are split. Others are in all
            parts, such as a mask of positions, also in a later batch with as many samples as positions.
        count: Returns the number of parts from the number of samples.
        whole_sizes: Sizes of tensors in earlier batches, to which those of this batch are added.
    """
    leaves, tree = flatten(values)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes or not sizes[0]:
        raise wrong_value(
            "batch", type(values).__name__, "it has no tensor with samples", "Pass a batch with tensors"
        )
    total = sizes[0]
    num_parts, structure = count(total), str(tree)

    def has_samples(leaf: Any, index: int) -> bool:
        if not (isinstance(leaf, Tensor) and leaf.ndim):
            return False
        known = whole_sizes.setdefault((structure, index, leaf.ndim), set())
        known.update({len(leaf)} - {total})
        return len(leaf) == total and known <= {1}  # tensors of one row are repeated for all samples

    parts = [
        list(torch.tensor_split(leaf, num_parts)) if has_samples(leaf, index) else [leaf] * num_parts
        for index, leaf in enumerate(leaves)
    ]
    split = [torch_private.pytree.tree_unflatten(list(part), tree) for part in zip(*parts, strict=True)]
    return split, [len(part) for part in torch.arange(total).tensor_split(num_parts)]


def split_into_microbatches(
    model: nn.Module,
    batch: object,
    count: Callable[[int], int],
    whole_sizes: WholeSizes,
    *,
    has_loss: bool,
    is_sum: bool,
) -> list[MicroBatch]:
    """Returns the micro-batches of a batch.

    Args:
        batch: The batch, as for `arguments_of`.
        count: Returns the number of micro-batches from the number of samples.
        whole_sizes: As for `split_batch`.
        has_loss: Whether there is a loss function. Otherwise the model computes its loss, as those of
            transformers do.
        is_sum: Whether losses are sums, which are added, or means, which are averaged.
    """
    parts, sizes = split_batch(dict(batch) if isinstance(batch, Mapping) else batch, count, whole_sizes)
    weights = [1.0] * len(sizes) if is_sum else _shares(sizes)
    return [
        MicroBatch(*arguments_of(model, part, has_loss), size, weight)
        for part, size, weight in zip(parts, sizes, weights, strict=True)
    ]


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / (sum(counts) or 1) for count in counts]


Shares = list[float]
"""Share of each micro-batch in the labels of a batch."""


def shares_of_labels(microbatches: Sequence[MicroBatch]) -> tuple[Shares, Shares] | None:
    """Returns the shares in all labels, and in those after the first of each sample.

    Labels of -100 do not count. It is None for labels that are not classes.
    """
    labels: list[Any] = [each.kwargs.get("labels") for each in microbatches]
    if not all(isinstance(each, Tensor) and each.ndim and not each.is_floating_point() for each in labels):
        return None
    later = [each[:, 1:] if each.ndim > 1 else each for each in labels]
    # The host waits once for the device.
    counts = torch.stack([(each != -100).sum() for each in (*labels, *later)]).tolist()
    return _shares(counts[: len(labels)]), _shares(counts[len(labels) :])


def weight_of_labels(
    microbatches: Sequence[MicroBatch],
    index: int,
    shares: Callable[[], tuple[Shares, Shares] | None],
    outputs: object,
    skipped: int | None,
) -> tuple[float, int | None]:
    """Returns the weight of the loss that a model computes for a micro-batch, as the mean over its labels.

    Args:
        shares: Returns `shares_of_labels` of the micro-batches.
        skipped: Number of labels of each sample that the loss skips, which is 1 in causal language models, or
            None if no loss has shown it yet.

    Returns:
        The weight, and the number of skipped labels.
    """
    part = microbatches[index]
    labels = part.kwargs.get("labels")
    if "num_items_in_batch" in part.kwargs and _num_skipped(outputs, labels) is None:
        return 1.0, skipped  # the model divides the sum of its losses by it
    found = shares()
    if found is None:
        return part.weight, skipped
    if skipped is None and found[0] == found[1] == _shares([each.size for each in microbatches]):
        return part.weight, None
    if skipped is None and found[0][index]:
        skipped = _num_skipped(outputs, labels)
        if skipped is None:
            raise PreparationError(
                "Micro-batches have different numbers of labels that are not -100, and the loss of the model "
                "is not the mean of the cross entropy over these labels, so the loss of the batch is "
                "unknown. Pass loss_fn, or set microbatches=1."
            )
    return found[skipped or 0][index], skipped


def _num_skipped(outputs: Any, labels: Any) -> int | None:
    """Returns how many labels of each sample the loss of a model skips, or None if it is not known.

    All tokens have nearly the same loss in a model with random weights, so the closest mean is taken.
    """
    get = outputs.get if isinstance(outputs, Mapping) else partial(getattr, outputs)
    loss, logits = get("loss", None), get("logits", None)
    if (
        not all(isinstance(each, Tensor) for each in (loss, logits, labels))
        or logits.shape[:-1] != labels.shape
    ):
        return None
    tolerance = 1e-2 if logits.element_size() < 4 else 1e-4
    differences = []
    for skipped in range(min(2, labels.ndim)):
        used, own = (logits[:, :-1], labels[:, 1:]) if skipped else (logits, labels)
        used = used.detach().flatten(0, -2).float()
        expected = cross_entropy(used, own.flatten().to(used.device))
        differences.append(abs(float(expected - loss.detach().float())))
    closest, *others = sorted(differences)
    size = abs(float(loss.detach()))
    is_clear = all(other - closest > torch.finfo(loss.dtype).eps * size for other in others)
    return differences.index(closest) if closest <= tolerance * size + 1e-8 and is_clear else None


def zero_loss(outputs: object) -> Tensor:
    """Returns a loss whose gradients are zeros."""
    tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    return sum((tensor.flatten()[:0].sum() for tensor in tensors), torch.zeros(()))


class Computed(NamedTuple):
    """Outputs and loss of a micro-batch."""

    microbatch: MicroBatch
    outputs: Any
    loss: Tensor


def check_loss(computed: Sequence[Computed], loss_fn: LossFunction, is_sum: bool) -> None:
    """Raises an error if the loss of micro-batches together is not the mean or sum of their losses.

    Such a loss, for example over pairs of samples, is not that of one process in a pipeline.
    """
    sizes = [each.microbatch.size for each in computed]
    losses = [each.loss for each in computed]
    both = merge_outputs([each.outputs for each in computed], sizes)
    target = merge_outputs([each.microbatch.target for each in computed], sizes)
    is_low = any(torch.finfo(t.dtype).bits < 32 for t in tensors_in(both) if t.is_floating_point())
    is_close = partial(torch.allclose, rtol=2e-2 if is_low else 1e-4, atol=1e-5)
    try:
        with rng.restored_generators(losses[0].device):
            again = loss_of(computed[0].outputs, computed[0].microbatch.target, loss_fn)
            together = loss_of(both, target, loss_fn).detach().float()
    except (ConfigurationError, PreparationError, StateError):
        raise
    except Exception as error:
        raise PreparationError(
            f"loss_fn raises {type(error).__name__} ({error}) when it is called once more to compare losses, "
            "for the outputs of a micro-batch and for those of several ones together. It must use its "
            "arguments only, and no values that hooks or layers keep for it: return these from the forward "
            "of the model."
        ) from error
    if again.requires_grad or (again.isfinite() and not is_close(again.float(), losses[0].float())):
        raise PreparationError(
            "loss_fn uses parameters or attributes of layers besides the outputs of the model, and in a "
            "pipeline only the rank of the last stage computes it, without the layers of other ranks. Return "
            "what it needs from the forward of the model, or use weight_decay of the optimizer for a penalty "
            "on weights."
        )
    weights = [1.0 if is_sum else float(size) for size in sizes]
    weighted = [w * loss.float() for w, loss in zip(weights, losses, strict=True)]
    apart = torch.stack(weighted).sum() / (1 if is_sum else sum(weights))
    if not together.isfinite() or is_close(together, apart):
        return
    raise not_additive(len(computed), together, apart, is_sum)


def not_additive(count: int, together: Tensor, apart: Tensor, is_sum: bool) -> PreparationError:
    """Returns the error for a loss of micro-batches together that is not the mean or sum of their losses."""
    kind = "sum" if is_sum else "mean"
    return PreparationError(
        f"The loss of {count} micro-batches together is {together.item():.4g}, and the {kind} of their "
        f"losses is {apart.item():.4g}, so the loss of a batch is not the {kind} over its samples. For a "
        "mean over tokens return the sum and use accumulate(model, num_items=...). A loss over pairs of "
        "samples needs the whole batch, so set microbatches=1."
    )


def merge_outputs(
    parts: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    whole_sizes: WholeSizes | None = None,
) -> Any:
    """Returns nested outputs of a batch from those of its micro-batches.

    Tensors with one entry for each sample are concatenated, and scalars are averaged. Other values are those
    of the first micro-batch, and must be the same in each.

    Args:
        sizes: Number of samples of each.
        weights: Weight of the scalars of each. None takes the number of samples.
        whole_sizes: Sizes that outputs without samples have had in other micro-batches, to which those of
            these outputs are added.

    Raises:
        PreparationError: Values of micro-batches differ, and are not one for each sample.
    """
    flat = [flatten(part) for part in parts]
    structure = f"outputs {flat[0][1]}"
    merged = []
    for index, leaves in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        place = structure, index, getattr(leaves[0], "ndim", 0)
        known: set[int] = set() if whole_sizes is None else whole_sizes.setdefault(place, set())
        merged.append(_merge(leaves, sizes, weights or sizes, known))
    return torch_private.pytree.tree_unflatten(merged, flat[0][1])


def _merge(leaves: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], whole: set[int]) -> Any:
    first = leaves[0]
    if all(leaf is first for leaf in leaves):  # of the whole batch
        return first
    if not isinstance(first, Tensor):
        if isinstance(first, (int, float, str)) and any(leaf != first for leaf in leaves):
            raise PreparationError(
                f"Micro-batches have the values {listed(list(dict.fromkeys(map(str, leaves))))}, and a batch "
                "has one. Return tensors with one entry for each sample, or set microbatches=1."
            )
        return first
    if first.ndim:
        whole.update(len(leaf) for leaf, n in zip(leaves, sizes, strict=True) if len(leaf) != n)
        if not whole:
            return torch.cat(list(leaves))
    if not first.ndim and first.is_floating_point():
        used = [(leaf * weight, weight) for leaf, weight in zip(leaves, weights, strict=True) if weight]
        return (
            torch.stack([leaf for leaf, _ in used]).sum() / sum(weight for _, weight in used)
            if used
            else first
        )
    if all(torch.equal(leaf, first) for leaf in leaves[1:]):
        return first
    raise PreparationError(
        f"Micro-batches of {list(sizes)} samples have a tensor of shape {list(first.shape)}, which is not "
        "one entry for each sample in the first dimension, and its values differ. Return it with the "
        "samples in the first dimension, or set microbatches=1."
    )
