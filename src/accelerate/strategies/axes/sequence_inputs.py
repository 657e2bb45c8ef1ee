"""Inputs of models as shards of sequences, and outputs as whole sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError
from accelerate.strategies.axes.head_exchange import join
from accelerate.strategies.axes.sequence_shards import SequenceShards

Change = Callable[[str, Tensor], Tensor]
FIRST = ("input_ids", "inputs_embeds", "decoder_input_ids")
"""Names of inputs whose dimension 1 is the sequence, in models of transformers."""
IGNORED = -100


class Inputs(NamedTuple):
    """Arguments of a forward, which are whole sequences or shards."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Returns whether an argument is given and is not None."""
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """Returns an argument by its name, or None."""
        return {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}.get(name)

    def map(self, change: Change) -> Inputs:
        """Returns the arguments with changed tensors, which may be in mappings and sequences."""
        names = (*self.names, *(f"argument {i}" for i in range(len(self.names), len(self.args))))
        args = tuple(_map(change, name, value) for name, value in zip(names, self.args, strict=False))
        return self._replace(args=args, kwargs={k: _map(change, k, v) for k, v in self.kwargs.items()})

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns all tensors with their names."""
        found: list[tuple[str, Tensor]] = []

        def append(name: str, tensor: Tensor) -> Tensor:
            found.append((name, tensor))
            return tensor

        self.map(append)
        return found

    def added(self, **kwargs: Any) -> Inputs:
        """Returns the arguments with further keyword arguments."""
        return self._replace(kwargs={**self.kwargs, **kwargs})

    def signature(self, length: int, dims: Mapping[str, int | None]) -> Any:
        """Returns what outputs may depend on besides the values of tensors.

        Args:
            length: Length of the sequences in the arguments.
            dims: Dimensions that the program gives.
        """
        tensors = tuple(
            (name, tensor.ndim, dim_of(name, tensor, length, dims)) for name, tensor in self.tensors()
        )
        options = {k: v for k, v in self.kwargs.items() if isinstance(v, (bool, str)) or v is None}
        return tensors, tuple(sorted(options.items(), key=str))


def _map(change: Change, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, Mapping):
        changed = {key: _map(change, str(key), each) for key, each in value.items()}
        return changed if type(value) is dict or not changed else type(value)(changed)  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_map(change, name, each) for each in value)
    return value


def inputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Returns the arguments of a forward with their names."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return Inputs(args, dict(kwargs), tuple(each.name for each in parameters if each.kind in kinds))


def length_of(inputs: Inputs, name: str) -> int:
    """Returns the length of the sequences of a forward.

    Args:
        name: Class of the model.

    Raises:
        ConfigurationError: No argument has a dimension of sequences.
    """
    for first in FIRST:
        if isinstance(value := inputs.get(first), Tensor):
            return int(value.shape[1])
    tensors = [tensor for key, tensor in inputs.tensors() if tensor.ndim > 1 and "mask" not in key]
    if not tensors:
        raise ConfigurationError(
            f"{name} gets no tensor of shape [batch, sequence, ...], so there is no sequence that sp_size "
            "divides. Pass one, or set sp_size=1."
        )
    return tensors[0].shape[1]


def dim_of(name: str, tensor: Tensor, length: int, dims: Mapping[str, int | None]) -> int | None:
    """Returns the dimension of a tensor along which sequences are divided, or None for a whole tensor.

    Args:
        dims: Dimensions by the names of arguments that the program gives.
    """
    if name in dims:
        return dims[name]
    if name == "position_ids":
        return tensor.ndim - 1 if tensor.shape[-1] == length else None
    if tensor.ndim < 2 or "mask" in name or tensor.shape[1] != length:
        return None
    is_matrix = tensor.ndim > 1 and tensor.shape[-2:] == (length, length) and name not in FIRST
    return None if is_matrix and (tensor.ndim > 2 or tensor.dtype == torch.bool) else 1


def is_ambiguous(inputs: Inputs, shards: SequenceShards, dims: Mapping[str, int | None]) -> bool:
    """Returns whether a whole input is as long as the part of a rank.

    Functions of attention cannot distinguish it from the positions of the rank.
    """
    return any(
        tensor.ndim > 1
        and tensor.shape[1] in shards.sizes
        and "mask" not in name
        and dim_of(name, tensor, shards.length, dims) is None
        for name, tensor in inputs.tensors()
    )


def sharded(inputs: Inputs, shards: SequenceShards, dims: Mapping[str, int | None]) -> Inputs:
    """Returns the arguments with the positions of this rank."""

    def shard(name: str, tensor: Tensor) -> Tensor:
        dim = dim_of(name, tensor, shards.length, dims)
        return tensor if dim is None else shards.shard(tensor, dim).contiguous()

    return inputs.map(shard)


def whole(inputs: Inputs, shards: SequenceShards, dims: Mapping[str, int | None]) -> Inputs:
    """Returns the arguments with whole sequences, from the positions of each rank.

    Called on all ranks of the group.
    """

    def joined(name: str, tensor: Tensor) -> Tensor:
        dim = dim_of(name, tensor, shards.own, dims)
        return tensor if dim is None else join(tensor, dim, shards)

    return whole_masks(inputs, shards).map(joined)


def whole_masks(inputs: Inputs, shards: SequenceShards) -> Inputs:
    """Returns the arguments with masks of whole sequences, which attention needs.

    Called on all ranks of the group.
    """

    def joined(name: str, tensor: Tensor) -> Tensor:
        is_shard = "mask" in name and tensor.ndim == 2 and tensor.shape[1] == shards.own != shards.length
        return join(tensor, 1, shards) if is_shard else tensor

    return inputs.map(joined)


def beginning(inputs: Inputs, length: int, size: int, dims: Mapping[str, int | None]) -> Inputs:
    """Returns the arguments with the first positions of whole sequences.

    Args:
        dims: Dimensions that the program gives.
    """

    def cut(name: str, tensor: Tensor) -> Tensor:
        if (dim := dim_of(name, tensor, length, dims)) is not None:
            return tensor.narrow(dim, 0, size).contiguous()
        if name.startswith("cu_seq"):
            lengths: Tensor = torch.unique_consecutive(tensor.clamp(max=size))
            return lengths
        for dim in range(1, tensor.ndim) if dims.get(name, 0) is not None else ():
            if tensor.shape[dim] == length and dim >= tensor.ndim - 2:
                tensor = tensor.narrow(dim, 0, size)
        return tensor

    return inputs.map(cut)


# transformers


def transformers_part(model: nn.Module) -> nn.Module | None:
    """Returns the outermost model of transformers in a model, or None."""
    return next(
        (
            part
            for part in model.modules()
            if any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)
        ),
        None,
    )


def completed(inputs: Inputs, model: nn.Module, part: nn.Module, length: int) -> Inputs:
    """Returns the arguments of a model of transformers with those that it would derive from whole sequences.

    Args:
        inputs: The arguments, with whole sequences.
        model: The model, which is a model of transformers or has one.
        part: The model of transformers.
    """
    parameters = inspect.signature(part.forward).parameters
    if part is not model:  # which passes some arguments on
        own = inspect.signature(model.forward).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in own.values())
        parameters = parameters if takes_all else own
    if "position_ids" in parameters and not inputs.has("position_ids"):
        device = inputs.tensors()[0][1].device
        inputs = inputs.added(position_ids=torch.arange(length, device=device).unsqueeze(0))
    is_missing = "attention_mask" in parameters and not inputs.has("attention_mask")
    if getattr(getattr(part, "config", None), "alibi", False) and is_missing:
        first = inputs.tensors()[0][1]
        inputs = inputs.added(attention_mask=first.new_ones(first.shape[0], length, dtype=torch.long))
    labels = inputs.get("labels")
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    shifts = getattr(getattr(part, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    if isinstance(labels, Tensor) and not inputs.has("shift_labels") and takes_all and shifts:
        shifted = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        inputs = inputs.added(shift_labels=shifted)
    return inputs


def without_cache(outputs: Any) -> Any:
    """Returns outputs of a model of transformers without keys and values, which are those of this rank."""
    if isinstance(outputs, tuple):
        kept = (None if type(each).__name__.endswith("Cache") else each for each in outputs)
        return tuple(kept) if type(outputs) is tuple else outputs
    if isinstance(outputs, Mapping) and outputs.get("past_key_values") is not None:
        kind: Any = type(outputs)
        return kind(**{name: value for name, value in outputs.items() if name != "past_key_values"})
    return outputs
