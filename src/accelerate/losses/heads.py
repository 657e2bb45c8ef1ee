"""Weights of a head, which is the last linear layer of a language model, in the layouts of a run.

A head is a linear layer, an embedding or a weight that is used as one, or a LoRA layer of peft around one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError, wrong_value
from accelerate.ops import is_dtensor
from accelerate.parallelism_config import AXES, MeshAxis

Result = TypeVar("Result")
Unit: TypeAlias = tuple[nn.Module, nn.Module]
"""Module whose forward gathers weights, and the module whose forward it calls then."""
KNOWN_HOOKS = ("torch.distributed.", "accelerate.")
"""Beginnings of the names of Python modules whose hooks on a head do not change its logits and gradients."""
OTHER_AXES = tuple(name for name in AXES if name != MeshAxis.TP.value)
"""Names of the dimensions of a mesh that shard no layers, with which names of flattened dimensions begin."""
FIX = "Call lm_loss in the forward of the model, whose parameters are whole there"


class Adapter(NamedTuple):
    """LoRA adapter of a head."""

    down: nn.Module
    up: nn.Linear
    dropout: nn.Module
    scaling: float


@dataclass(frozen=True)
class Head:
    """Parts of a head.

    Attributes:
        layer: Linear layer or embedding with the weight, or None for a weight itself.
        weight: The weight, if there is no layer.
        adapters: Its active adapters.
        units: Units of FSDP that have only weights of the head, the outer ones first.
        casts_inputs: Whether inputs of adapters are cast to the dtype of their weights.
    """

    layer: nn.Module | None
    weight: Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    units: tuple[Unit, ...] = ()
    casts_inputs: bool = True

    @property
    def in_features(self) -> int:
        """Size of the hidden states."""
        return self._shape[1]

    @property
    def vocabulary_size(self) -> int:
        """Number of entries of the whole vocabulary."""
        return self._shape[0]

    @property
    def _shape(self) -> tuple[int, int]:
        if isinstance(self.layer, nn.Linear):
            return self.layer.out_features, self.layer.in_features
        if isinstance(self.layer, nn.Embedding):
            return self.layer.num_embeddings, self.layer.embedding_dim
        assert self.weight is not None
        return self.weight.shape[0], self.weight.shape[1]

    def parameters(self) -> Iterator[Tensor]:
        """Yields the weights of which logits are computed, as they are now."""
        modules = [self.layer, *(adapter.up for adapter in self.adapters)]
        if self.weight is not None:
            yield self.weight
        for module in modules:
            if module is not None:
                yield from module.parameters(recurse=False)


def read_head(head: nn.Module | Tensor) -> Head:
    """Returns the parts of a head, or raises an error for one whose logits are not a matrix product."""
    if any(hasattr(each, "ds_id") for each in (head.parameters() if isinstance(head, nn.Module) else [head])):
        raise PreparationError(
            "ZeRO 3 shards the weights of the head, and gathers them in its forward, which lm_loss does not "
            "call. Use ZeRO 1 or 2, or FSDP 2, or compute logits and torch's cross_entropy."
        )
    if isinstance(head, Tensor):
        if head.ndim != 2 or not head.is_floating_point():
            raise _not_linear(head, f"it is a tensor of shape {list(head.shape)} and dtype {head.dtype}")
        return Head(None, head)
    if not isinstance(head, nn.Module):
        raise _not_linear(head, f"it is a {type(head).__name__}")
    inner, units = _unwrap(head)
    lora = _lora_of(inner)
    if lora is None:
        return Head(_checked(inner), units=tuple(units))
    layer, adapters = lora
    _check_hooks(inner)
    ups = [_checked(adapter.up) for adapter in adapters]
    parts: list[nn.Module] = [getattr(inner, "lora_B"), layer, *ups]  # noqa: B009
    units += [(part, part) for part in parts if torch_private.is_unit_of_fsdp2(part)]
    casts_inputs = getattr(inner, "cast_input_dtype_enabled", True)
    return Head(_checked(layer), None, tuple(adapters), tuple(units), casts_inputs)


def _unwrap(head: nn.Module) -> tuple[nn.Module, list[Unit]]:
    """Returns the layer in wrappers, and the units of FSDP around it, the outer ones first."""
    units: list[Unit] = []
    peft = sys.modules.get("peft")
    while True:
        head = torch_private.uncompiled(head)
        if torch_private.is_unit_of_fsdp2(head):
            units.append((head, head))
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(head).__mro__):
            inner: Any = head.module
            units.append((head, inner))
            head = inner
        elif peft is not None and isinstance(head, peft.utils.ModulesToSaveWrapper):
            head = _trained_copy(head)
        else:
            return head, units


def _trained_copy(wrapper: Any) -> nn.Module:
    """Returns the copy of a layer that peft trains, or the layer itself if its adapter is not active."""
    names, copies = wrapper.active_adapters, wrapper.modules_to_save
    is_active = names and not wrapper.disable_adapters and all(name in copies for name in names)
    return copies[names[0]] if is_active else wrapper.original_module  # type: ignore[no-any-return]


def _lora_of(module: nn.Module) -> tuple[nn.Module, list[Adapter]] | None:
    """Returns the layer in a LoRA layer of peft and its active adapters, or None for other modules."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.tuners.lora.layer.LoraLayer):
        return None
    lora: Any = module
    is_linear = isinstance(module, peft.tuners.lora.layer.Linear)
    if not is_linear or type(lora).forward is not peft.tuners.lora.layer.Linear.forward:
        raise _not_linear(module, f"{type(module).__name__} of peft is not the LoRA of a linear layer")
    if lora.disable_adapters and lora.merged:
        lora.unmerge()  # as its forward does
    if lora.merged or lora.disable_adapters:
        return lora.base_layer, []
    names = [name for name in lora.active_adapters if name in lora.lora_A]
    if others := [name for name in names if name in lora.lora_variant]:
        raise _not_linear(module, f"its adapter {others[0]!r} is a variant of LoRA, such as DoRA")
    adapters = [
        Adapter(lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name], lora.scaling[name])
        for name in names
    ]
    return lora.base_layer, adapters


def _checked(layer: nn.Module) -> nn.Module:
    """Returns a layer that computes `hidden @ weight.T + bias` and nothing else, or raises an error."""
    kinds = [kind for kind in (nn.Linear, nn.Embedding) if isinstance(layer, kind)]
    if not kinds or type(layer).forward is not kinds[0].forward or "forward" in vars(layer):
        raise _not_linear(layer, f"{type(layer).__name__} has a forward of its own")
    _check_hooks(layer)
    return layer


def _check_hooks(module: nn.Module) -> None:
    """Raises an error for hooks of a module that is not called, which may change weights or gradients."""
    hooks = (getattr(hook, "func", hook) for hook in torch_private.hooks_of(module))
    names = {str(getattr(hook, "__module__", type(hook).__module__)) for hook in hooks}
    if others := [name for name in names if not f"{name}.".startswith(KNOWN_HOOKS)]:
        raise _not_linear(module, f"it has a hook of {others[0]}, which lm_loss does not call")


def _not_linear(head: object, reason: str) -> ValueError:
    fix = (
        "Pass the nn.Linear that computes the logits, the nn.Embedding or weight that is tied to it, or a "
        "LoRA layer of peft around it; for other heads compute the logits and torch's cross_entropy"
    )
    return wrong_value("head", head, f"its logits are not a matrix product: {reason}", fix)


def compute_in_units(units: Sequence[Unit], hidden: Tensor, compute: Callable[[Tensor], Result]) -> Result:
    """Returns what a function of the hidden states returns while the weights of units are gathered.

    It runs as the forward of each unit, so that FSDP gathers weights once, keeps them until the backward
    pass, and reduces their gradients once.
    """
    if not units:
        return compute(hidden)
    (unit, called), *inner = units
    results: list[Result] = []

    def forward(hidden: Tensor) -> Any:
        if is_dtensor(hidden):
            raise PreparationError(
                "The head is a unit of FSDP and sharded by tensor parallelism, whose hooks expect logits. "
                "Leave it out of the auto_wrap_policy, so that it is gathered with the model."
            )
        results.append(compute_in_units(inner, hidden, compute))
        return results[0]

    attributes = vars(called)
    with ExitStack() as stack:
        if torch.is_grad_enabled():
            stack.enter_context(torch_private.kept_after_forward(unit))
        stack.callback(attributes.pop, "forward")
        attributes["forward"] = forward
        unit(hidden)
    return results[0]  # not the output of the unit, which may be cast to a lower precision


def matrices_of(head: Head, hidden: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None, int, Any]:
    """Returns the matrix products and the bias of a head whose weights are gathered.

    Their sum is the logits of the entries on this rank.

    Args:
        head: The head.
        hidden: Hidden states of shape (N, features).

    Returns:
        Pairs of inputs of shape (N, features) and weights of shape (entries on this rank, features); the bias
        of shape (entries on this rank,), or None; the index of the first entry on this rank; and the process
        group over which entries are sharded, or None.
    """
    layer = head.layer
    weight, first, group = _local_rows(layer.weight if layer is not None else head.weight, head)
    products = [(hidden, weight)]
    bias = getattr(layer, "bias", None)
    bias = None if bias is None else _local_rows(bias, head)[0]
    for adapter in head.adapters:
        up, *_ = _local_rows(adapter.up.weight, head)
        if up.shape[0] != weight.shape[0]:
            raise PreparationError(
                f"The LoRA adapter of the head has {up.shape[0]} of {head.vocabulary_size} entries of the "
                f"vocabulary on this rank, and its weight {weight.shape[0]}. Shard both with the same style."
            )
        inputs = hidden.to(next(adapter.down.parameters()).dtype) if head.casts_inputs else hidden
        products.append((adapter.down(adapter.dropout(inputs)) * adapter.scaling, up))
        if adapter.up.bias is not None:
            more = _local_rows(adapter.up.bias, head)[0] * adapter.scaling
            bias = more if bias is None else bias + more
    return products, bias, first, group


def _local_rows(parameter: Any, head: Head) -> tuple[Tensor, int, Any]:
    """Returns the rows of a weight on this rank, the index of the first one, and the group of all rows."""
    if hasattr(parameter, "__tensor_flatten__") and not is_dtensor(parameter):
        raise _not_linear(head.layer, f"a weight is a {type(parameter).__name__}, such as a quantized one")
    if not is_dtensor(parameter):
        is_whole = parameter.ndim and parameter.shape[0] == head.vocabulary_size
        if not is_whole:
            raise PreparationError(
                f"A weight of the head has shape {list(parameter.shape)} now, and "
                f"{head.vocabulary_size} rows when it is whole: FSDP 1 has sharded it. {FIX}."
            )
        return parameter, 0, None
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 or any(name.startswith(OTHER_AXES) for name in names):
        raise refuse_shards(parameter)
    if placements[0].is_replicate():
        return parameter.to_local(), 0, None
    if not placements[0].is_shard(0):
        raise PreparationError(
            f"A weight of the head is sharded as {placements[0]} over its mesh, and lm_loss needs rows. "
            "Use the style 'colwise' or 'colwise_rep' for the head in tp_plan."
        )
    group, rows = mesh.get_group(), parameter.to_local()
    chunk = -(-head.vocabulary_size // mesh.size())  # as torch.chunk divides them
    first = min(chunk * mesh.get_local_rank(), head.vocabulary_size)
    return rows, first, group


def refuse_shards(weight: Tensor) -> PreparationError:
    """Returns the error for a weight that FSDP shards now."""
    mesh: Any = getattr(weight, "device_mesh", None)
    return PreparationError(
        f"A weight of the head, of shape {list(weight.shape)}, is sharded over {mesh} now: FSDP gathers it "
        f"in the forward of the model. {FIX}."
    )
