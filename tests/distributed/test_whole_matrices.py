"""Optimizers that need whole matrices step shards and replicas as they step whole models on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import PreparationError, StateError, is_torch_version
from accelerate.strategies.fsdp import distribute_like, named_parameters
from accelerate.utils import ExpertParallelConfig, PipelineConfig

Run = Callable[..., list[Any]]
WHOLE, SHARDS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
slow = pytest.mark.slow
needs_pipelines = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(4, 6, 6))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.weight)):
            token, place = torch.where(chosen == expert)
            part = weights[token, place].unsqueeze(1) * (tokens[token] @ self.weight[expert])
            output = output.index_add(0, token, part)
        return output


class Mixture(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, chosen, weights)


class Net(nn.Module):
    """With tied weights, frozen parameters, and matrices that ranks cannot divide or that are smaller."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 6, bias=False)
        kind = Mixture if "ep" in layout.split() else Block
        self.blocks = nn.ModuleList(kind(width) for width in (10, 4, 8, 2))
        self.small = nn.Linear(6, 1)
        self.leave = nn.Linear(6, 6, bias=False)
        if "pp" not in layout.split() and "ep" not in layout.split():
            self.leave.weight = self.enter.weight
        self.blocks[1].requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * torch.tanh(self.small(x))


class Kron(torch.optim.Optimizer):
    """Optimizer with preconditioners of both sides in a list, a counter, and a counter of the group."""

    whole_matrices = True

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], group["num_steps"])

    def _update(self, p: Tensor, lr: float, num_steps: int) -> None:
        state, gradient = self.state[p], p.grad
        assert gradient is not None
        if gradient.ndim != 2:
            average = state.setdefault("average", torch.zeros_like(p))
            p.sub_(average.lerp_(gradient, 0.5).mul(lr / gradient.norm()))
            return
        sides = state.setdefault("sides", [p.new_zeros(n, n, dtype=torch.float32) for n in p.shape])
        state["num_steps"] = num_steps
        exact = gradient.float()
        sides[0] += exact @ exact.T
        sides[1] += exact.T @ exact
        scaled = exact / (1e-3 + sides[0].diag().sqrt().outer(sides[1].diag().sqrt()))
        p.sub_((lr * scaled / scaled.norm()).to(p.dtype))


def accelerator_of(layout: str, kind: str = WHOLE, **options: Any) -> Accelerator:
    words = layout.split()
    mesh: dict[str, Any] = {}
    if "tp" in words:
        mesh["tp_size"] = 2
    if "pp" in words:
        mesh.update(pp_size=2, pp_handler=PipelineConfig(microbatches=2, schedule="1f1b"))
    if "ep" in words:
        handler = ExpertParallelConfig(is_experts=lambda module: isinstance(module, Experts))
        mesh.update(ep_size=2, ep_handler=handler)
    if "hsdp" in words:
        mesh.update(dp_replicate_size=2, dp_shard_size=2)
    if "fsdp2" in words and mesh:
        mesh["dp_shard_size"] = 2
    if "fsdp2" in words or "hsdp" in words:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=kind,
            transformer_cls_names_to_wrap=["Mixture" if "ep" in words else "Block"],
            auto_wrap_policy="transformer_based_wrap",
            cpu_offload="offloaded" in words,
        )
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**mesh) if mesh else None, **options)


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "muon":
        others = [p for p in trained if p.ndim != 2]
        matrices = [p for p in model.parameters() if p.ndim == 2]  # frozen ones, too
        return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)]
    if name == "kron":
        return [Kron(trained)]
    import pytorch_optimizer

    if name == "soap":
        return [pytorch_optimizer.SOAP(trained, lr=0.01, precondition_frequency=2)]
    return [pytorch_optimizer.Shampoo(trained, lr=0.01, preconditioning_compute_steps=2)]


def gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Iterates over gradients of all weights, without that of one weight in the second step."""
    generator = torch.Generator().manual_seed(1)
    for number in range(100):
        values = {
            name: torch.randn(p.shape, generator=generator).to(p.dtype)
            for name, p in model.named_parameters()
            if p.requires_grad and not (number == 1 and name == "blocks.2.up.weight")
        }
        values.setdefault("leave.weight", values["enter.weight"])  # tied
        yield values


def prepared(
    layout: str, name: str, kind: str = WHOLE, dtype: torch.dtype = torch.float32, net: str = ""
) -> Any:
    accelerator = accelerator_of(layout, kind)
    model = Net(net or layout, dtype)
    reference = copy.deepcopy(model)
    if layout == "sharded before":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizers = optimizers_of(name, model)
    options = {} if name in ("muon", "kron") else {"whole_matrices": True}
    model, *optimizers = accelerator.prepare(model, *optimizers, **options)
    return accelerator, model, optimizers, reference


def set_gradients(accelerator: Any, model: Any, values: dict[str, Tensor]) -> None:
    model.zero_grad()
    for name, parameter in named_parameters(accelerator.unwrap_model(model)).items():
        if name in values:
            parameter.grad = distribute_like(values[name].clone(), parameter)


def train(layout: str, name: str, dtype: torch.dtype, num_steps: int = 4) -> Any:
    accelerator, model, optimizers, reference = prepared(layout, name, dtype=dtype)
    plain = optimizers_of(name, reference)
    calls: list[Any] = []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **options: calls.append(args) or exchange(*args, **options)
    counts = set()
    for _, values in zip(range(num_steps), gradients(reference), strict=False):
        set_gradients(accelerator, model, values)
        for key, parameter in reference.named_parameters():
            parameter.grad = values[key].clone() if key in values else None
        calls.clear()
        for optimizer in (*optimizers, *plain):
            optimizer.step()
        counts.add(len(calls))
    dist.all_to_all_single = exchange
    whole = accelerator.get_state_dict(model)
    expected = reference.state_dict()
    wrong = [name for name, value in whole.items() if not torch.equal(value, expected[name])]
    return wrong, counts, len(optimizers[0].state), len(plain[0].state), len(whole)


LAYOUTS = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("hsdp", 4),
    ("tp", 2),
    pytest.param("ddp", 4, marks=slow),
    pytest.param("fsdp2", 1, marks=slow),
    pytest.param("fsdp2", 3, marks=slow),
    pytest.param("fsdp2 tp", 4, marks=slow),
    pytest.param("fsdp2 offloaded", 2, marks=slow),
    pytest.param("sharded before", 2, marks=slow),
    pytest.param("ep", 2, marks=slow),
    pytest.param("fsdp2 ep", 4, marks=slow),
    pytest.param("pp", 2, marks=[slow, needs_pipelines]),
    pytest.param("fsdp2 pp", 4, marks=[slow, needs_pipelines]),
]
OPTIMIZERS = ["muon", *(pytest.param(name, marks=slow) for name in ("kron", "soap", "shampoo"))]


def num_exchanges(layout: str, name: str) -> int:
    """Returns the number of all-to-alls of a step."""
    if layout == "pp":
        return 0  # each parameter is on one rank
    return 1 if layout == "ddp" or (layout, name) == ("ep", "muon") else 2  # owners have whole parameters


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("layout", "processes"), LAYOUTS)
def test_weights_equal_those_of_one_process(
    run: Run, layout: str, processes: int, name: str, dtype: torch.dtype
) -> None:
    results = run(train, layout, name, dtype, processes=processes)
    assert results[0][4] > 0
    for wrong, counts, _, _, _ in results:
        assert not wrong
        assert counts == {num_exchanges(layout, name) if processes > 1 else 0}
    states = sum(held for _, _, held, _, _ in results)
    assert states == results[0][3]  # each state is on one rank


def step(accelerator: Any, model: Any, optimizers: list[Any], values: dict[str, Tensor]) -> None:
    set_gradients(accelerator, model, values)
    for optimizer in optimizers:
        optimizer.step()


def resume(layout: str, name: str, kind: str) -> Any:
    accelerator, model, optimizers, reference = prepared(layout, name, kind)
    values = [value for _, value in zip(range(5), gradients(reference), strict=False)]
    for value in values[:3]:
        step(accelerator, model, optimizers, value)
    accelerator.save_state("checkpoint")
    weights = []
    for _ in range(2):
        for value in values[3:]:
            step(accelerator, model, optimizers, value)
        weights.append(copy.deepcopy(accelerator.get_state_dict(model)))
        accelerator.load_state("checkpoint")
    equal = all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    return equal, str(Path("checkpoint").resolve()), weights[0], sum(len(o.state) for o in optimizers)


def continue_in(layout: str, name: str, kind: str, net: str, folder: str) -> Any:
    accelerator, model, optimizers, reference = prepared(layout, name, kind, net=net)
    accelerator.load_state(folder)
    num_states = sum(len(optimizer.state) for optimizer in optimizers)
    for number, value in zip(range(5), gradients(reference), strict=False):
        if number >= 3:
            step(accelerator, model, optimizers, value)
    return accelerator.get_state_dict(model), num_states


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        (("fsdp2", 2), SHARDS, [("one", 1), ("fsdp2", 3), ("ddp", 2)]),
        (("ddp", 2), WHOLE, [("one", 1), ("fsdp2", 2), ("ddp", 3)]),
        pytest.param(("fsdp2", 2), WHOLE, [("one", 1), ("ddp", 2), ("fsdp2", 3)], marks=slow),
        pytest.param(("hsdp", 4), SHARDS, [("one", 1), ("fsdp2 tp", 4)], marks=slow),
        pytest.param(("tp", 2), WHOLE, [("one", 1), ("fsdp2", 2)], marks=slow),
        pytest.param(("ep", 2), SHARDS, [("one", 1), ("fsdp2 ep", 4)], marks=slow),
        pytest.param(("pp", 2), SHARDS, [("one", 1), ("fsdp2 pp", 4)], marks=[slow, needs_pipelines]),
        pytest.param(("one", 1), WHOLE, [("pp", 2), ("fsdp2 pp", 4)], marks=[slow, needs_pipelines]),
        pytest.param(("one", 1), WHOLE, [("ddp", 2), ("fsdp2", 3), ("hsdp", 4)], marks=slow),
    ],
)
def test_states_are_saved_and_loaded_with_another_layout(
    run: Run, layout: tuple[str, int], kind: str, others: list[tuple[str, int]], name: str
) -> None:
    results = run(resume, layout[0], name, kind, processes=layout[1])
    assert all(equal for equal, _, _, _ in results)
    _, folder, expected, _ = results[0]
    for other, processes in others:
        loaded = run(continue_in, other, name, kind, layout[0], folder, processes=processes)
        weights, num_states = loaded[0]
        assert all(torch.equal(value, expected[key]) for key, value in weights.items())
        assert weights
