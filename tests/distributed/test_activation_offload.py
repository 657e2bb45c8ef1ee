"""Offload of the inputs of recomputed blocks on several ranks, with copies between tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.samples.recomputed import LAYERS, batches_of, built
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerate import Accelerator, ParallelismConfig
from accelerate.strategies import activation_offload
from accelerate.strategies.activation_offload import ActivationOffload, Copy
from accelerate.utils import ActivationCheckpointing, PipelineConfig

Run = Callable[..., list[Any]]
MICROBATCHES = 4


class Clones:
    """Transfer between two tensors on the CPU, which counts copies."""

    copies: list[str] = []

    def accepts(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        self.copies.append("out")
        return torch.empty_like(tensor).copy_(tensor), Copy(tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> Copy:
        self.copies.append("back")
        return Copy(torch.empty_like(tensor).copy_(tensor))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(way: str, offload: bool) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Returns losses, weights after two steps, and the numbers of copies in both directions."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    activation_offload.MIN_BYTES = 256
    activation_offload.offload_to_host = lambda *_: ActivationOffload(Clones)
    options: dict[str, Any] = {}
    if way not in ("ddp", "adopted units"):
        config = PipelineConfig(schedule=way, microbatches=MICROBATCHES)
        options = {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=config)}
    handler = ActivationCheckpointing(offload=offload)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], **options)
    net = built()
    net.eval()  # micro-batches draw their own dropout
    if way == "adopted units":
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    rank = accelerator.process_index if not options else 0
    losses = []
    for batch in batches_of(count=4)[2 * rank :][:2]:
        loss = accelerator.forward_backward(model, (batch, batch[:, :7]), torch.nn.functional.mse_loss)
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()
    }
    return losses, state, Clones.copies.count("out"), Clones.copies.count("back")


@pytest.mark.parametrize(
    "way", ["ddp", "adopted units", "1f1b", pytest.param("gpipe", marks=pytest.mark.slow)]
)
def test_ranks_train_as_with_recomputation(run: Run, way: str) -> None:
    expected, found = run(train, way, False), run(train, way, True)
    for (losses, weights, _, _), (reference, original, none, _) in zip(found, expected, strict=True):
        assert none == 0
        assert losses == reference
        assert weights.keys() == original.keys()
        assert all(torch.equal(weights[name], value) for name, value in original.items())
    num_forwards = 2 * (MICROBATCHES if way in ("1f1b", "gpipe") else 2)
    # A pipeline also compares the first batch with the model that was not split.
    assert sum(out for _, _, out, _ in found) >= num_forwards * LAYERS
    assert all(0 < back < out for _, _, out, back in found)
