"""Documents of packed sequences, found in masks, boundaries or positions of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accelerate import torch_private
from accelerate.base import ConfigurationError

NONE = -1
"""Number of positions of padding, which belong to no document."""
LENGTHS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
"""Names of cumulative lengths of documents in a batch."""
DOCUMENTS = ("seq_idx", "document_ids", "sequence_ids")
"""Names of the number of the document of each position in a batch."""


def documents_of(batch: object, boundaries: object = None) -> Tensor | None:
    """Returns the number of the document of each position of a batch, or None if the batch has no boundaries.

    Args:
        batch: Inputs of a model: a mapping, a sequence or a tensor, whose tensors begin with (rows, length).
        boundaries: Cumulative lengths, as `cu_seqlens` of shape (documents + 1,), or the number of the
            document of each position, of shape (rows, length), with -1 for padding. By default the batch has
            `cu_seqlens`, `seq_idx`, an `attention_mask` with numbers of documents, or `position_ids` that
            restart.

    Returns:
        Integers of shape (rows, length), in which neighbors differ where a document begins.

    Raises:
        ConfigurationError: The boundaries do not fit the batch.
    """
    rows, length = shape_of(batch)
    values: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    documents = _given(boundaries, rows, length) if boundaries is not None else None
    if documents is None:
        named = [values[name] for name in (*LENGTHS, *DOCUMENTS) if isinstance(values.get(name), Tensor)]
        documents = _given(named[0], rows, length) if named else _from_masks(values)
    positions = values.get("position_ids")
    if documents is None and isinstance(positions, Tensor) and positions.ndim <= 2:
        positions = positions.expand(rows, length)
        begins = positions[:, 1:] <= positions[:, :-1]
        documents = F.pad(begins.long().cumsum(1), (1, 0))
    mask = values.get("attention_mask")
    if documents is not None and isinstance(mask, Tensor) and mask.shape == documents.shape:
        documents = documents.masked_fill(mask == 0, NONE)
    return documents


def shape_of(batch: Any) -> tuple[int, int]:
    """Returns the number of rows and the length of a batch of sequences."""
    names = ("input_ids", "inputs_embeds") if isinstance(batch, Mapping) else ()
    named = [batch[name] for name in names if name in batch]
    leaves = [leaf for leaf in [*named, *torch_private.pytree.tree_leaves(batch)] if isinstance(leaf, Tensor)]
    shape = next((leaf.shape for leaf in leaves if leaf.ndim >= 2), None)
    if shape is None:
        raise ConfigurationError(
            "The batch has no tensor of shape (rows, length), so it has no sequences of documents. Pass the "
            "inputs of the model, such as input_ids and position_ids."
        )
    return int(shape[0]), int(shape[1])


def _given(boundaries: object, rows: int, length: int) -> Tensor:
    """Returns the documents of explicit boundaries."""
    values = torch.as_tensor(boundaries)
    if values.is_floating_point() or values.ndim not in (1, 2):
        raise ConfigurationError(
            f"boundaries have dtype {values.dtype} and {values.ndim} dimensions. Pass integers: cumulative "
            "lengths of shape (documents + 1,), or the document of each position of shape (rows, length)."
        )
    if values.ndim == 2:
        if tuple(values.shape) != (rows, length):
            raise ConfigurationError(
                f"boundaries have shape {tuple(values.shape)}, and the batch has sequences of shape "
                f"{(rows, length)}. Pass the document of each position."
            )
        return values
    ends = values.tolist()
    if ends[:1] != [0] or ends[-1] != rows * length or ends != sorted(set(ends)):
        raise ConfigurationError(
            f"boundaries {ends} are not cumulative lengths of {rows * length} positions. They begin with 0, "
            f"increase, and end with {rows * length}."
        )
    lengths = values.diff().long()
    return torch.arange(len(lengths), device=values.device).repeat_interleave(lengths).view(rows, length)


def _from_masks(values: Mapping[str, Any]) -> Tensor | None:
    """Returns an attention mask with numbers of documents in place of ones, or None."""
    mask = values.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
        return None
    return mask if mask.dtype != torch.bool and bool((mask > 1).any()) else None


def has_several(documents: Tensor | None) -> bool:
    """Returns whether a row has positions of two documents."""
    if documents is None or documents.shape[1] < 2:
        return False
    first, second = documents[:, :-1], documents[:, 1:]
    return bool(((first != second) & (first != NONE) & (second != NONE)).any())
