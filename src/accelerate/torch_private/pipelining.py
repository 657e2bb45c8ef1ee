"""Stage of `torch.distributed.pipelining` whose micro-batches may have different sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from types import FrameType
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, _backward
from torch.utils.checkpoint import CheckpointFunction


def is_in_reentrant_checkpoint() -> bool:
    """Returns whether the caller runs in the forward of a reentrant checkpoint."""
    code = CheckpointFunction.forward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def watch_clipping(check: Callable[[Iterable[Tensor]], None]) -> Callable[[], None]:
    """Calls a method with the parameters whose gradients `torch.nn.utils.clip_grad_norm_` clips.

    Args:
        check: A bound method, which is called as long as its object exists.

    Returns:
        A function that ends this.
    """
    from torch.nn.utils import clip_grad

    reference = WeakMethod(check)
    original = clip_grad._clip_grads_with_norm_  # also called by names that were imported before

    @wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if (method := reference()) is not None:
            method(several)
        return original(several, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clip

    def end() -> None:
        clip_grad._clip_grads_with_norm_ = original

    return end


Specs = Sequence[Any]
"""Shape and dtype of each tensor that stages exchange."""


class UnevenPipelineStage(PipelineStage):
    """Stage that exchanges tensors whose shapes depend on the micro-batch.

    torch allocates the same buffers for all micro-batches.

    Args:
        group: Process group of the pipeline.
        inputs: Tensors that the stage receives, for each micro-batch.
        outputs: Tensors that it returns, for each micro-batch.
        reduces_gradients: Returns whether FSDP reduces the gradients after the last micro-batch. It keeps
            those of the whole parameters otherwise.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        inputs: Sequence[Specs],
        outputs: Sequence[Specs],
        reduces_gradients: Callable[[], bool],
    ) -> None:
        example = [tuple(map(_example, specs[0])) for specs in (inputs, outputs)]
        super().__init__(
            module, index, num_stages, device, input_args=example[0], output_args=example[1], group=group
        )
        self._inputs, self._outputs = inputs, outputs
        self._reduces_gradients = reduces_gradients
        self._loses_weights: bool | None = None
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch expects the shapes of the first micro-batch.
        self._runtime_validate = False

    def _post_metadata_inference_cleanup(self) -> None:
        """Keeps gradients, which torch clears for FSDP although the shapes are known without a forward pass.

        A stage is made when the shapes of micro-batches change, also within an accumulation window.
        """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        if not self.is_first:
            self._resize(self.args_recv_info, self._inputs)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        if not self.is_last:
            self._resize(self.grad_recv_info, self._outputs)

    def _resize(self, buffers: dict[int, Any], specs: Sequence[Specs]) -> None:
        for chunk, infos in buffers.items():
            for info, spec in zip(infos, specs[chunk], strict=True):
                if info.buffer is not None and info.buffer.shape != spec.shape:
                    info.buffer = info.buffer.new_empty(spec.shape)
                # Since torch 2.15 the metadata gives the shape of a buffer that is allocated later.
                if info.tensor_meta is not None and info.tensor_meta.shape != spec.shape:
                    stride = _example(spec).stride()
                    info.tensor_meta = replace(info.tensor_meta, shape=spec.shape, stride=stride)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:
            gradients = zip(self.bwd_cache[bwd_chunk_id], self._inputs[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                self._zeros(spec) if gradient is None else gradient.contiguous()
                for gradient, spec in gradients
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    # torch exchanges gradients between two stages on one rank also without a backward pass.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if self._loses_weights is None:
            self._loses_weights = self._find_lost_weights(bwd_kwargs)
        if not self._loses_weights:
            return super().backward_maybe_with_nosync("input", bwd_kwargs, last_backward)
        if bwd_kwargs["output_grads"] is None:  # of the loss, which a whole pass takes as a tensor
            bwd_kwargs = {**bwd_kwargs, "stage_output": bwd_kwargs["stage_output"][0]}
        gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
        return gradients, []  # nothing is left for the pass of the weights

    def _find_lost_weights(self, bwd_kwargs: dict[str, Any]) -> bool:
        """Returns whether weights influence the loss only where inputs of the stage do not.

        The separate pass of torch for weights begins at nodes of the graph that the gradients of inputs pass.
        """

        def nodes(tensors: Iterable[Any]) -> list[Any]:
            # Since torch 2.15 a sent output is its gradient edge, or None without one.
            roots = (each for each in tensors if getattr(each, "requires_grad", each is not None))
            return [_backward._get_grad_fn_or_grad_acc(each) for each in roots]

        weights = nodes(self.submod.parameters())
        graph = _backward.construct_reverse_graph(nodes(bwd_kwargs["stage_output"]))
        reached = set(graph)  # a defaultdict, which get_param_groups extends
        groups = _backward.get_param_groups(nodes(bwd_kwargs["input_values"]), weights, graph)
        found = {weight for group in groups for weight in group["params"]}
        return any(weight in reached and weight not in found for weight in weights)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        module: Any = self.submod
        if self._reduces_gradients() or not isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
            return
        # As torch does, without the reduction
        module.set_reshard_after_backward(True)
        if hasattr(module, "finalize_backward"):  # since torch 2.15
            if self.has_backward:
                module.finalize_backward()
                module.set_manual_backward_finalization(False)
            return
        module.set_is_last_backward(True)
        root: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        root._root_post_backward_final_callback()

    def _zeros(self, spec: Any) -> Tensor | None:
        """Returns the gradient of a tensor that the loss does not depend on."""
        if not spec.dtype.is_floating_point:
            return None
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)


def _example(spec: Any) -> Tensor:
    requires_grad = spec.dtype.is_floating_point
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=requires_grad)
