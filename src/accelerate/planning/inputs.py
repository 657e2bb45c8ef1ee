"""Batches on the meta device for models of transformers and timm, built from their configurations.

Called by `accelerate estimate-memory` for models that the user gives by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError, wrong_value

DEFAULT_LENGTH, DEFAULT_IMAGE_SIZE = 512, 224
PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
"""Suffixes of the class names of models whose labels have one integer per sample."""


def batch_for(model: nn.Module, batch_size: int, length: int | None) -> dict[str, Any]:
    """Returns the keyword arguments of a forward pass, which returns a loss if the model has one.

    Args:
        model: Model of transformers.
        batch_size: Number of samples.
        length: Tokens in each sequence. None uses the maximum of the model, but at most 512.
    """
    config: Any = model.config
    limit = _max_length(config)
    default = min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if length is not None and not 0 < length <= (limit or length):
        reason = f"sequences of {type(model).__name__} have 1 to {limit or 'any number of'} tokens"
        raise wrong_value("sequence_length", length, reason, "Give a number in that range")
    shape = batch_size, length or default
    accepted = inspect.signature(model.forward).parameters
    name = str(getattr(model, "main_input_name", "input_ids"))
    if name not in INPUTS:
        raise ConfigurationError(
            f"{type(model).__name__} takes {name}, for which no batch can be made from its configuration. "
            "Write a function that returns the model and a batch, and pass it as module:function."
        )
    batch: dict[str, Any] = {name: INPUTS[name](config, shape)}
    if "return_loss" in accepted:  # a model of pairs of texts and images
        batch |= {name: INPUTS[name](config, shape) for name in ("input_ids", "pixel_values")}
        return {**batch, "return_loss": True}
    if "labels" in accepted:
        batch["labels"] = _indices(None, shape[:1] if type(model).__name__.endswith(PER_SAMPLE) else shape)
    elif {"start_positions", "end_positions"} <= set(accepted):
        batch |= {name: _indices(None, shape[:1]) for name in ("start_positions", "end_positions")}
    elif "decoder_input_ids" in accepted:
        batch["decoder_input_ids"] = _indices(None, shape)
    return batch


def _max_length(config: object) -> int | None:
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    texts = (config, getattr(config, "text_config", None))
    sizes = (getattr(text, name, None) for text in texts for name in names)
    return next((size for size in sizes if isinstance(size, int)), None)


def _indices(config: object, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _images(config: object, shape: tuple[int, ...]) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or DEFAULT_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    return torch.empty(shape[0], getattr(vision, "num_channels", 3), height, width, device="meta")


def _spectrograms(config: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape[0], config.num_mel_bins, 2 * config.max_source_positions, device="meta")


INPUTS: Mapping[str, Callable[[Any, tuple[int, ...]], Tensor]] = {
    "input_ids": _indices,
    "pixel_values": _images,
    "input_features": _spectrograms,
}
"""Name of a model input -> function that returns its tensor for a configuration and (samples, tokens)."""


def timm_batch(model: Any, batch_size: int) -> tuple[Tensor, Tensor]:
    """Returns images and labels for a model of timm."""
    images = torch.empty(batch_size, *model.default_cfg["input_size"], device="meta")
    return images, _indices(None, (batch_size,))


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the cross entropy of a model that returns logits."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def loss_or_mean(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Returns the loss in the output of a model, or the mean of its first output if it has no loss."""
    output = model(**batch)
    loss = getattr(output, "loss", None)
    mean: Tensor = output[0].float().mean() if loss is None else loss
    return mean
