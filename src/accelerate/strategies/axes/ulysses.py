"""Ulysses sequence parallelism, in which DeepSpeed's attention exchanges heads for sequences.

Source: https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/
"""

from __future__ import annotations

from functools import cache
from typing import Any

from accelerate.base import PreparationError
from accelerate.nested import send_to_device
from accelerate.strategies.layer import Layer
from accelerate.strategies.session import mark_prepared


class UlyssesAxis(Layer):
    """Axis along which the sequences of transformers models are sharded."""

    divided_by = "sp_size"

    def __init__(self, strategy: Any) -> None:
        parallelism = strategy.context.request.parallelism
        self._size, self._handler = int(parallelism.sp_size), parallelism.sp_handler

    def transform_model(self, model: Any, micro_batch_size: int = 1) -> Any:
        """Registers DeepSpeed's attention for a transformers model."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        handler = self._handler
        check_attention(model, self._size, handler.sp_attn_implementation)
        if self.groups is not None:
            raise PreparationError(
                "A second model with sp_size > 1: DeepSpeed keeps one attention for all models of a "
                "process. Prepare one model only."
            )
        self.groups = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=handler.sp_attn_implementation,
            sequence_parallel_size=self._size,
            micro_batch_size=micro_batch_size,
            seq_length=handler.sp_seq_length,
            seq_length_is_variable=handler.sp_seq_length_is_variable,
        )
        return model

    def transform_loader(self, loader: Any, model: Any) -> Any:
        """Returns a loader of this rank's shard of input_ids, position_ids and labels."""
        if self.groups is None:
            raise PreparationError(
                "Sequences are sharded after the model is prepared: prepare the model first."
            )
        groups = self.groups
        return mark_prepared(
            loader_class()(
                loader,
                sp_rank=groups.get_sequence_parallel_rank(),
                sp_group=groups.get_sequence_parallel_group(),
                sp_world_size=groups.get_sequence_parallel_world_size(),
                device=model.device,
            )
        )


def check_attention(model: object, size: int, attention: str) -> None:
    """Raises an error for a model whose attention cannot be split over `size` ranks."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None:
        raise PreparationError(
            f"{kind} has no `config`: sp_size={size} shards the sequences of transformers models only. Set "
            "sp_size=1, or cp_size for other models."
        )
    chosen = getattr(config, "_attn_implementation", None)
    if chosen not in (None, attention):
        raise PreparationError(
            f"{kind} computes attention by {chosen!r}, and sp_attn_implementation is {attention!r}. Load it "
            f"with attn_implementation={attention!r}, or set sp_attn_implementation={chosen!r}."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", size)
    if heads % size:
        raise PreparationError(
            f"{kind} has {heads} attention heads, which sp_size={size} does not divide. Choose a size that "
            "divides them."
        )


@cache
def loader_class() -> type[Any]:
    """Returns DeepSpeed's loader adapter as a class that also moves batches and sets `end_of_dataloader`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    class UlyssesLoader(UlyssesSPDataLoaderAdapter):  # type: ignore[misc]  # DeepSpeed is not typed
        """Loader of this rank's shard of each sequence."""

        _ends = False

        def refill(self) -> None:
            super().refill()
            self._ends = bool(getattr(self.dl, "end_of_dataloader", False))

        def __next__(self) -> Any:
            batch = super().__next__()
            if self._ends:  # the inner loader has ended, but its last batch is still yielded shard by shard
                self.dl.end_of_dataloader = not self.micro_batches
            return send_to_device(batch, self.device)

    return UlyssesLoader
