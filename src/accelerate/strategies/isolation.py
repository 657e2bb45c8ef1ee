"""Isolation of the documents of packed sequences, which is checked by gradients.

Documents are isolated if the outputs of a document have no gradient with respect to the input embeddings of
the others. This holds for attention with document masks, and for convolutions and recurrent layers that
restart at each document. The check needs no knowledge of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from accelerate import rng, torch_private
from accelerate.base import ConfigurationError, PreparationError
from accelerate.ops import is_dtensor, is_on_any_rank, run_on_all_ranks
from accelerate.strategies import axes
from accelerate.strategies.base import Strategy
from accelerate.strategies.documents import NONE, documents_of, has_several, shape_of
from accelerate.strategies.dtensors import clean_name
from accelerate.strategies.layer import Layer, WeakStrategy
from accelerate.strategies.module_state import ModuleState

POSITIONS = "positions"
"""Kind of a leak that is not in a module."""
MIN_COUNTED = 3
"""Length from which indices that increase by 1 are taken for positions."""


class Leak(NamedTuple):
    """A module whose outputs for a document depend on another document.

    Attributes:
        module: Name of the first such module, or "" for the code of the model itself.
        kind: Name of its class.
    """

    module: str
    kind: str


class _Inputs(TorchFunctionMode):
    """Replaces embeddings that are looked up by leaves of the graph, and notes tables of positions.

    Args:
        numbers: Number of the document of each position of this rank.
        documents: Number of the document of each position of whole sequences.
        tokens: Tensors of the batch that are not positions, even if they count.
        layer: Layer that splits sequences.
    """

    def __init__(self, numbers: Tensor, documents: Tensor, tokens: Sequence[Tensor], layer: Layer) -> None:
        super().__init__()
        self.numbers, self.documents, self.tokens, self.layer = numbers, documents, tokens, layer
        self.leaves: list[Tensor] = []
        self.has_shifted_positions = False

    def __torch_function__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is not F.embedding:
            return output
        indices = args[0] if args else kwargs["input"]
        positions = self.layer.joined({"position_ids": indices})["position_ids"]
        if any(_are_shifted(positions, numbers) for numbers in (self.numbers, self.documents)):
            is_token = any(torch.equal(indices, tokens) for tokens in self.tokens)
            self.has_shifted_positions |= not is_token
        if output.shape[:2] != self.numbers.shape:
            return output
        leaf = output.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf


def _are_shifted(indices: Tensor, numbers: Tensor) -> bool:
    """Returns whether indices count the positions of a row over the boundaries of its documents."""
    rows = indices.unsqueeze(0) if indices.ndim == 1 else indices
    if rows.ndim != 2 or rows.shape[1] != numbers.shape[1] or rows.shape[1] < MIN_COUNTED:
        return False
    return bool((rows.diff(dim=1) == 1).all()) and has_several(numbers)


def _tokens_in(batch: object) -> list[Tensor]:
    """Returns the tensors of a batch that are not named positions, or the first one without names."""
    if isinstance(batch, Mapping):
        return [
            value for name, value in batch.items() if isinstance(value, Tensor) and "position" not in name
        ]
    leaves = torch_private.pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)][:1]


class _Outputs:
    """Outputs and inputs of modules in the order in which they are computed.

    Args:
        shape: Number of rows and their length.
    """

    def __init__(self, model: nn.Module, shape: torch.Size) -> None:
        self.rows: list[tuple[str, nn.Module, Tensor | None, Tensor]] = []
        self._shape = shape
        self._hooks = [
            module.register_forward_hook(self._hook_of(name), with_kwargs=True)
            for name, module in model.named_modules()
        ]

    def _hook_of(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
            tensor = self._first(output)
            if tensor is not None and tensor.requires_grad:
                given = self._first((args, kwargs))
                given = None if given is None else axes.resumed_in_part(given)
                self.rows.append((name, module, given, axes.resumed_in_part(tensor)))

        return note

    def _first(self, values: object) -> Tensor | None:
        """Returns the first floating-point tensor with one row for each position."""
        for leaf in torch_private.pytree.tree_leaves(values):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim < 2:
                continue
            if leaf.shape[:2] == self._shape or leaf.shape[0] == self._shape.numel():
                return leaf
        return None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class IsolationCheck:
    """Check of one batch, which computes the model for each question.

    Args:
        batch: Its inputs: a mapping of keyword arguments, a sequence of arguments, or one tensor.
        documents: Document of each position, of shape (rows, length).
        device: Device of the random generators.
        layer: Layer that splits sequences, or one that does nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        documents: Tensor,
        device: torch.device,
        layer: Layer,
    ) -> None:
        self._model, self._device, self._layer = model, device, layer
        begins = documents[:, 1:] != documents[:, :-1]
        self._documents = F.pad(begins.long().cumsum(1), (1, 0)).masked_fill(documents == NONE, NONE)
        self._numbers = self._documents.clone()
        self._batch = torch_private.pytree.tree_map_only(Tensor, self._as_input, batch)
        leaves = [leaf for leaf in torch_private.pytree.tree_leaves(self._batch) if isinstance(leaf, Tensor)]
        self._inputs = [leaf for leaf in leaves if leaf.requires_grad]
        self._buffers = [
            *(leaf for leaf in leaves if leaf.shape[:2] == documents.shape and not leaf.requires_grad),
            self._numbers,
        ]
        self._tokens = _tokens_in(self._batch)
        self.num_outputs = 0
        self.has_shifted_positions = False

    def _as_input(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor of the batch, by which gradients are computed if it has features."""
        has_features = tensor.is_floating_point() and tensor.ndim > 2
        copied = tensor.detach().clone()
        return copied.requires_grad_(has_features and tensor.shape[:2] == self._numbers.shape)

    def find(self) -> Leak | None:
        """Returns the first module that leaks, or None if documents are isolated."""
        color = next((color for color in (1, 0) if self._leaks(color, -1)), None)
        if color is None:
            return Leak("", POSITIONS) if is_on_any_rank(self.has_shifted_positions, self._device) else None
        first, last = 0, self.num_outputs - 1
        while first < last:
            middle = (first + last) // 2
            first, last = (first, middle) if self._leaks(color, middle) else (middle + 1, last)
        with self._computed() as (outputs, _):
            name, module, *_ = outputs.rows[first]
        if name and self._leaks(color, first, of_inputs=True):  # by code of the module that calls it
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
        return Leak(clean_name(name), type(module).__name__)

    def _leaks(self, color: int, index: int, *, of_inputs: bool = False) -> bool:
        """Returns whether a tensor of a module for every second document depends on the others, on any rank.

        Args:
            color: Remainder of the numbers of the documents whose values are followed, divided by 2.
            index: Number of the module in the order of computation.
            of_inputs: Whether to follow its inputs in place of its outputs.
        """
        with self._computed() as (outputs, leaves):
            self.num_outputs = len(outputs.rows)
            _, _, given, output = outputs.rows[index]
            tensor = given if of_inputs else output
            last = outputs.rows[-1][3]
            is_leak = (
                tensor is not None and tensor.requires_grad and self._depends(tensor, last, leaves, color)
            )
        return is_on_any_rank(is_leak, self._device)

    @contextmanager
    def _computed(self) -> Iterator[tuple[_Outputs, list[Tensor]]]:
        """Computes the outputs of the model, and yields those of its modules and the inputs."""
        with ExitStack() as stack:
            stack.enter_context(rng.restored_generators(self._device))
            stack.callback(ModuleState(self._model).restore_values)
            dims = [1] * len(self._buffers)
            stack.enter_context(self._layer.split_batch(buffers=self._buffers, buffer_seq_dims=dims))
            outputs = _Outputs(self._model, self._numbers.shape)
            stack.callback(outputs.remove)
            leaves_of = _Inputs(self._numbers, self._documents, self._tokens, self._layer)
            with leaves_of as inputs, torch.enable_grad(), torch_private.without_reentrant_checkpoints():
                self._call()
            self.has_shifted_positions = inputs.has_shifted_positions
            leaves = [*inputs.leaves, *self._inputs]
            if not leaves or not outputs.rows:
                lacking = "inputs" if outputs.rows else "outputs"
                raise PreparationError(
                    f"check_isolation() found no {lacking} of {type(self._model).__name__} with one row for "
                    f"each of {tuple(self._numbers.shape)} positions. Pass a model that looks up embeddings, "
                    "or has floating-point inputs of shape (rows, length, ...)."
                )
            yield outputs, leaves

    def _call(self) -> None:
        if isinstance(self._batch, Mapping):
            self._model(**self._batch)
        elif isinstance(self._batch, Tensor):
            self._model(self._batch)
        else:
            self._model(*self._batch)

    def _depends(self, tensor: Tensor, last: Tensor, leaves: Sequence[Tensor], color: int) -> bool:
        """Returns whether the rows of some documents have gradients by the inputs of the others.

        Zeros are passed back from the last outputs, because FSDP gathers a unit in the backward pass of its
        outputs.
        """
        tensor, numbers = _whole(tensor), self._numbers.to(tensor.device)
        chosen = (numbers >= 0) & (numbers % 2 == color)
        others = (numbers >= 0) & (numbers % 2 != color)
        rows = tensor if tensor.shape[:2] == numbers.shape else tensor.view(*numbers.shape, *tensor.shape[1:])
        generator = torch.Generator().manual_seed(0)  # the sum of a softmax has no gradient
        weights = torch.randn(rows.shape, generator=generator).to(rows)
        total = (rows * weights)[chosen].sum() + 0.0 * _whole(last).sum()
        gradients = torch.autograd.grad(total, list(leaves), allow_unused=True)
        return any(
            bool((_whole(each)[others.to(each.device)] != 0).any()) for each in gradients if each is not None
        )


def _whole(tensor: Tensor) -> Tensor:
    """Returns a tensor, or the whole of a distributed one with its gradient."""
    whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def cause_of(leak: Leak, model: nn.Module, batch: object, *, is_causal: bool) -> str:
    """Returns the usual cause of a leak, with a fix."""
    name = f"{leak.module.rpartition('.')[2]} {leak.kind}".lower()
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if leak.kind == POSITIONS:
        return (
            "Positions are counted over the whole row, and do not restart at each document. Pass "
            "position_ids that restart at each document."
        )
    if "conv" in name:
        return "A convolution over positions reads across a boundary. Pass seq_idx, or pad between documents."
    if any(word in name for word in ("rnn", "lstm", "gru", "mamba", "ssm", "delta", "recurren")):
        return "The layer carries its state over a boundary. Pass cu_seqlens or seq_idx, so that it restarts."
    if is_causal:
        return (
            "Context parallelism computes causal attention over the whole sequence, without document masks. "
            "Train packed documents without cp_size."
        )
    if isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask == 1).all()):
        return (
            "An attention_mask of ones turns off masks of documents in transformers. Leave it out of the "
            "batch, and pass position_ids that restart."
        )
    if getattr(getattr(model, "config", None), "use_cache", False):
        return (
            "Models of transformers mask documents only without a cache of keys and values. Set "
            "model.config.use_cache = False."
        )
    return (
        "Its attention has no mask of documents. Pass position_ids that restart or cu_seqlens to an "
        "attention implementation that reads them, or a mask of shape (rows, 1, length, length)."
    )


def refuse_leaks(
    model: nn.Module,
    batch: object,
    documents: Tensor | None,
    device: torch.device,
    layer: Layer,
    fix: str = "",
) -> None:
    """Raises an error if the documents of a batch affect each other.

    Called on all ranks, also on those whose rows have one document.

    Args:
        documents: Document of each position, of shape (rows, length), or None for one document.
        layer: Layer that splits sequences, or one that does nothing.
        fix: Sentence at the end of the message.

    Raises:
        PreparationError: Documents affect each other.
    """
    if documents is None:
        documents = torch.zeros(shape_of(batch), dtype=torch.long)
    with torch.compiler.set_stance("force_eager"):
        leak = IsolationCheck(unwrapped(model), batch, documents, device, layer).find()
    if leak is None:
        return
    where = f"the outputs of `{leak.module}` ({leak.kind})" if leak.module else f"the outputs of {leak.kind}"
    what = (
        "the positions of a document depend on the length of the documents before it"
        if leak.kind == POSITIONS
        else f"{where} for one document depend on another document of its row"
    )
    raise PreparationError(
        f"The documents of packed sequences affect each other: {what}. "
        f"{cause_of(leak, unwrapped(model), batch, is_causal=not layer.masks_documents)}{fix}"
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module in `DistributedDataParallel`, whose forward expects a whole backward pass."""
    inner: nn.Module = torch_private.uncompiled(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


class PackingCheck(Layer):
    """Checks the first training batch of each model that takes positions."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = WeakStrategy(strategy)
        self._hooks: list[_FirstBatch] = []

    def finish_model(self, model: nn.Module, wrapped: nn.Module) -> None:
        first = _FirstBatch(self._strategy)
        first.handle = wrapped.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
        self._hooks.append(first)

    def release(self) -> None:
        """Leaves out the checks of all models."""
        for hook in self._hooks:
            hook.handle.remove()
        self._hooks = []


class _FirstBatch:
    """Hook that checks the first training batch if its positions restart, and removes itself."""

    handle: Any

    def __init__(self, strategy: WeakStrategy) -> None:
        self._strategy = strategy

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        self.handle.remove()
        names = inspect.signature(unwrapped(model).forward).parameters
        batch = {**dict(zip(names, args, strict=False)), **kwargs}
        positions = batch.get("position_ids")
        if not isinstance(positions, Tensor) or positions.ndim != 2:
            return
        strategy = self._strategy()
        layer, device = splitting_layer(strategy), strategy.context.device
        batch = layer.joined(batch)
        documents = run_on_all_ranks(partial(documents_of, batch), ConfigurationError)
        if is_on_any_rank(has_several(documents), device):
            fix = " DataLoaderConfiguration(check_packing=False) leaves out this check."
            refuse_leaks(model, batch, documents, device, layer, fix)


def splitting_layer(strategy: Strategy) -> Layer:
    """Returns the layer of a strategy that splits sequences, or one that does nothing."""
    return next((layer for layer in strategy.layers if layer.splits_buffers), Layer())


def check_isolation(strategy: Strategy, model: nn.Module, batch: object, boundaries: object) -> None:
    """Raises an error if the documents of packed sequences in a batch affect each other.

    Args:
        batch: Its inputs, with whole sequences.
        boundaries: Boundaries of documents, or None for those of the batch.

    Raises:
        PreparationError: Documents affect each other, or the model cannot be checked.
        ConfigurationError: The batch has no boundaries, or they do not fit it.
    """
    for layer in strategy.layers:
        if layer.divided_by:
            raise PreparationError(
                "check_isolation() computes the whole model for a batch on each rank, which "
                f"{layer.divided_by} divides. Check the model on one process, or without {layer.divided_by}."
            )
    device = strategy.context.device
    documents = run_on_all_ranks(partial(documents_of, batch, boundaries), ConfigurationError)
    if not is_on_any_rank(documents is not None, device):
        raise ConfigurationError(
            "The batch has no boundaries of documents. Pass position_ids that restart, cu_seqlens or seq_idx "
            "in the batch, or boundaries=..."
        )
    for layer in strategy.layers:
        if isinstance(layer, PackingCheck):  # whose check would begin in this one
            layer.release()
    if is_on_any_rank(has_several(documents), device):
        refuse_leaks(model, batch, documents, device, splitting_layer(strategy))
