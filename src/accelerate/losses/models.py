"""Models of transformers that compute their loss without logits.

The forward of the model runs unchanged. Its head returns a stand-in for the logits, which records the
operations on logits, such as a soft cap, and the loss function of the model computes the loss from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelerate.base import PreparationError, StateError
from accelerate.losses.lm import lm_loss
from accelerate.state import WeakReference

Model = TypeVar("Model", bound=nn.Module)
UNCHANGED = ("float", "to", "contiguous", "type", "type_as")
"""Methods of logits that do not change the loss, which is computed in float32."""


def use_lm_loss(model: Model, slice_size: int | None = None) -> Model:
    """Changes a causal language model of transformers so that training computes its loss without logits.

    In training mode, with gradients and `labels`, the model returns the loss that it returned before, and
    `logits` are None. In evaluation, without labels and in `generate` it returns logits as before. Called
    before `prepare` or before the model is passed to a Trainer, for a model or a peft model around it.

    Args:
        model: A model whose loss is `ForCausalLMLoss` of transformers, such as Llama, Qwen or GPT-2.
        slice_size: Entries of the vocabulary whose logits exist at a time, as for `Accelerator.lm_loss`.

    Returns:
        The same model.

    Raises:
        PreparationError: The model has no head, or another loss.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    causal: Any = model
    if hasattr(model, "get_base_model"):  # of peft
        causal = causal.get_base_model()
    kind = type(causal).__name__
    loss = getattr(causal, "loss_function", None)
    if isinstance(loss, LossWithoutLogits):
        return model
    if loss is not ForCausalLMLoss:
        raise PreparationError(
            f"{kind} does not compute the loss of causal language models: its loss_function is {loss}. Call "
            "accelerator.lm_loss with its hidden states and its head instead."
        )
    _name_of_head(causal)
    causal.loss_function = LossWithoutLogits(loss, slice_size)
    vars(causal)["forward"] = ForwardWithoutLogits(causal)
    return model


def _name_of_head(model: Any) -> str:
    """Returns the attribute of a model that has its head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    name = next((name for name, child in model.named_children() if child is head), None)
    if head is None or name is None:
        raise PreparationError(
            f"{type(model).__name__} has no head among its submodules: get_output_embeddings() returns "
            f"{type(head).__name__}. Call accelerator.lm_loss with its hidden states and its head instead."
        )
    return str(name)


class ForwardWithoutLogits:
    """Forward of a model that computes its loss without logits in training.

    It is the instance attribute `forward` of the model, to which it has a weak reference. Unlike a closure it
    can be pickled and copied with the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.inner = WeakReference(model), vars(model).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the forward of the model."""
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Callable[..., Any]:
        model = self._model()
        if model is None:
            raise StateError("The model of this forward has been deleted. Keep a reference to the model.")
        forward: Callable[..., Any] = self.inner or type(model).forward.__get__(model)
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if (
            model is None
            or not (model.training and torch.is_grad_enabled())
            or not self._has_labels(args, kwargs)
        ):
            return self._forward(*args, **kwargs)
        with _deferred_head(model):
            output = self._forward(*args, **kwargs)
        return _without_logits(output, type(model).__name__)

    def _has_labels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if not args:
            return kwargs.get("labels") is not None
        return self.__signature__.bind_partial(*args, **kwargs).arguments.get("labels") is not None


class LossWithoutLogits:
    """Loss function of a model, with the arguments of `ForCausalLMLoss`.

    Args:
        inner: The loss function for logits.
        slice_size: Entries of the vocabulary whose logits exist at a time, or None.
    """

    def __init__(self, inner: Callable[..., Tensor], slice_size: int | None) -> None:
        self.inner, self.slice_size = inner, slice_size
        self.__name__ = inner.__name__  # by which a loss that shifts labels is known

    def __call__(
        self,
        logits: object,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            return self.inner(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        targets = labels if shift_labels is None else shift_labels
        scale, soft_cap = logits.scale_and_cap()
        loss, _ = lm_loss(
            logits.hidden,
            logits.head,
            targets.to(logits.hidden.device),
            shift=shift_labels is None,
            reduction="mean" if num_items_in_batch is None else "sum",
            ignore_index=ignore_index,
            scale=scale,
            soft_cap=soft_cap,
            slice_size=self.slice_size,
        )
        logits.uses.append(logits)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class DeferredHead:
    """Head that returns a stand-in for its logits, and otherwise has the attributes of the head."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, self._head, [])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Stand-in for the logits of hidden states, with the operations that the forward of a model applies.

    Logits are `after * tanh(before * head(hidden))`, or `before * head(hidden)` without tanh.

    Attributes:
        uses: Objects of which a loss has been computed, which all stand-ins of a forward share.
    """

    hidden: Tensor
    head: nn.Module
    uses: list[DeferredLogits]
    before: float = 1.0
    after: float = 1.0
    has_tanh: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    def scale_and_cap(self) -> tuple[float, float | None]:
        """Returns the scale and the soft cap for `lm_loss`."""
        return (self.before * self.after, self.after) if self.has_tanh else (self.before, None)

    def __mul__(self, factor: object) -> DeferredLogits:
        if not isinstance(factor, (int, float)):
            raise _unsupported(f"multiplies logits by a {type(factor).__name__}")
        if self.has_tanh:
            return replace(self, after=self.after * factor)
        return replace(self, before=self.before * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> DeferredLogits:
        if not isinstance(divisor, (int, float)):
            raise _unsupported(f"divides logits by a {type(divisor).__name__}")
        return self * (1 / divisor)

    def tanh(self) -> DeferredLogits:
        """Applies tanh to the logits."""
        if self.has_tanh:
            raise _unsupported("applies tanh to logits twice")
        return replace(self, has_tanh=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in UNCHANGED:
            return lambda *args, **kwargs: self
        raise _unsupported(f"uses the {name} of logits")

    def __getitem__(self, index: object) -> Any:
        raise _unsupported("indexes logits")

    def __add__(self, other: object) -> Any:
        raise _unsupported("adds to logits")

    __radd__ = __sub__ = __add__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: object = None
    ) -> Any:
        if function is torch.tanh:
            return args[0].tanh()
        raise _unsupported(f"calls {getattr(function, '__name__', function)} with logits")


def _unsupported(what: str) -> PreparationError:
    return PreparationError(
        f"The forward of the model {what}, so its loss cannot be computed without them. Do not call "
        "use_lm_loss for this model, or call accelerator.lm_loss with its hidden states and its head."
    )


@contextmanager
def _deferred_head(model: nn.Module) -> Iterator[None]:
    """Lets the forward of a model find a `DeferredHead` in place of its head."""
    name = _name_of_head(model)
    # An instance attribute precedes the submodule, whose hooks are not called and whose name stays.
    vars(model)[name] = DeferredHead(getattr(model, name))
    try:
        yield
    finally:
        del vars(model)[name]


def _without_logits(output: Any, kind: str) -> Any:
    """Returns the output of a model with None for logits, from which its loss must be computed."""
    values = list(output.values()) if hasattr(output, "values") else list(output)
    deferred = [value for value in values if isinstance(value, DeferredLogits)]
    if not deferred or not all(logits.uses for logits in deferred):
        raise StateError(
            f"The forward of {kind} got labels and has not passed its logits to its loss_function. Do not "
            "call use_lm_loss for this model."
        )
    if not hasattr(output, "items"):
        return tuple(None if isinstance(value, DeferredLogits) else value for value in output)
    kept = {name: value for name, value in output.items() if not isinstance(value, DeferredLogits)}
    return type(output)(**kept)
