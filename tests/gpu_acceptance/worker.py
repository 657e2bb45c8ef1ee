"""One rank that `accelerate launch` has started: run one case, and write what it gave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

STEPS, WIDTH, ROWS = 6, 32, 8  # rows of one rank


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )


def make_data(processes: int) -> Tensor:
    return torch.randn(STEPS, processes * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train_plain(device: torch.device, data: Tensor) -> list[float]:
    """Return the losses of a loop of plain torch over all rows."""
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for rows in data.to(device):
        loss = model(rows).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(accelerator: Any, wrapper: str) -> dict[str, Any]:
    """Train on this rank's rows; return the losses over all rows beside those of a plain loop."""
    count, rank = accelerator.num_processes, accelerator.process_index
    data = make_data(count)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert wrapper in [each.__name__ for each in type(model).__mro__], type(model).__mro__
    losses = []
    for rows in data:
        loss = model(rows[rank * ROWS : (rank + 1) * ROWS].to(accelerator.device)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert sum(value.numel() for value in state.values()) == sum(
            p.numel() for p in make_model().parameters()
        )
    return {"losses": losses, "plain": train_plain(accelerator.device, data)}


def make_accelerator(request: dict[str, Any], **choices: Any) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(backend=request["backend"])] if request["backend"] else []
    return Accelerator(kwargs_handlers=handlers, **choices)


def fsdp_plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=WIDTH,
        state_dict_type="FULL_STATE_DICT",
    )


def run_ddp(request: dict[str, Any]) -> dict[str, Any]:
    return train(make_accelerator(request), "DistributedDataParallel")


def run_fsdp2(request: dict[str, Any]) -> dict[str, Any]:
    return train(make_accelerator(request, fsdp_plugin=fsdp_plugin()), "FSDPModule")


def run_one_rank(request: dict[str, Any], strategy: Any, wrapper: str, plugin: Any = None) -> dict[str, Any]:
    """Train one rank by a strategy for several: a single process has none by itself, and no group."""
    from accelerate import PartialState, strategies
    from accelerate.state import AcceleratorState

    open_group(PartialState())
    with mock.patch.object(strategies, "resolve_strategy", return_value=strategy):
        accelerator = make_accelerator(request)
    AcceleratorState().fsdp_plugin = plugin
    return train(accelerator, wrapper)


def run_ddp_on_one_rank(request: dict[str, Any]) -> dict[str, Any]:
    from accelerate.strategies import DataParallel

    return run_one_rank(request, DataParallel, "DistributedDataParallel")


def run_fsdp2_on_one_rank(request: dict[str, Any]) -> dict[str, Any]:
    from accelerate.strategies.fsdp import Fsdp2

    return run_one_rank(request, Fsdp2, "FSDPModule", fsdp_plugin())


def open_group(state: Any) -> str:
    """Open the default process group of this rank alone, over the library of its device."""
    from accelerate.state import process_group

    backend = state.device_backend
    bound = {"device_id": torch.device(backend.name, backend.current())} if backend.binds_group else {}
    return str(process_group.open_group(state.topology, backend, **bound))


def run_transport(request: dict[str, Any]) -> dict[str, Any]:
    """Run the operations of `TorchTransport` on tensors of the device and of the CPU."""
    from accelerate import PartialState
    from accelerate.ops.transport import TorchTransport

    state = PartialState()
    name = open_group(state)
    transport = TorchTransport(state)
    count = 0
    for device in (state.device, torch.device("cpu")):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            value = torch.tensor([[1, 0], [0, 1]], device=device).to(dtype)
            results = [transport.gather(value), transport.broadcast(value.clone())]
            results.append(transport.scatter([value], torch.empty_like(value)))
            results += (
                [] if dtype == torch.bool else [transport.reduce(value, how) for how in ("sum", "mean")]
            )
            for result in results:
                assert result.device.type == device.type
                assert torch.equal(result.to(dtype), value), (dtype, result, value)
            count += len(results)
    assert transport.gather_object({"a": 1}) == [{"a": 1}]
    assert transport.broadcast_object([1, "text"]) == [1, "text"]
    transport.barrier()
    return {"backend": name, "operations": count + 3}


def run_operations(request: dict[str, Any]) -> dict[str, Any]:
    """Run the operations of `Accelerator` on tensors whose values depend on the rank."""
    accelerator = make_accelerator(request)
    rank, count = accelerator.process_index, accelerator.num_processes
    own = torch.full((2,), float(rank), device=accelerator.device)
    assert accelerator.gather(own).tolist() == [float(each) for each in range(count) for _ in range(2)]
    assert accelerator.reduce(own, "sum").tolist() == [sum(range(count))] * 2
    assert accelerator.reduce(own, "mean").tolist() == [sum(range(count)) / count] * 2
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device))
    assert padded.tolist() == [1.0] * (rank + 1) + [0.0] * (count - rank - 1)
    from accelerate.utils import broadcast, broadcast_object_list, gather_object

    assert broadcast(own.clone()).tolist() == [0.0, 0.0]
    assert gather_object([rank]) == [*range(count)]
    assert broadcast_object_list([rank]) == [0]
    accelerator.wait_for_everyone()
    return {}


def run_matrices(request: dict[str, Any]) -> dict[str, Any]:
    """Step the matrices of Muon on the ranks that own them; weights are those of one process."""
    accelerator = make_accelerator(request)
    plain, model = make_model().to(accelerator.device), make_model()
    muons = [torch.optim.Muon([p for p in each.parameters() if p.ndim == 2]) for each in (plain, model)]
    prepared, muon = accelerator.prepare(model, muons[1])
    for rows in make_data(1).to(accelerator.device):
        for trained, optimizer in ((plain, muons[0]), (prepared, muon)):
            trained(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(prepared.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert 0 < len(muon.state) < len(muons[0].state)
    return {}


CASES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "transport": run_transport,
    "operations": run_operations,
    "ddp": run_ddp,
    "fsdp2": run_fsdp2,
    "matrices": run_matrices,
    "ddp_one": run_ddp_on_one_rank,
    "fsdp2_one": run_fsdp2_on_one_rank,
}


def main() -> None:
    request = json.loads(sys.argv[1])
    for module in request["imports"]:
        import_module(module)
    result = CASES[request["case"]](request)
    from accelerate import PartialState
    from accelerate.state import process_group

    state = PartialState()
    assert state.device.type == request["device"], f"the rank took {state.device}"
    row = {"processes": state.num_processes, "backend": state.backend, **result}
    target = Path(request["folder"]) / f"{state.process_index}.json"
    target.write_text(json.dumps(row), encoding="utf-8")
    process_group.close_group()


if __name__ == "__main__":
    main()
