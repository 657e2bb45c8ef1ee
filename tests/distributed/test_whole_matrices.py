"""Optimizers that need whole matrices step shards and replicas as they step whole models on one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.stand_ins.models import Experts, Mixture
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import PreparationError, StateError, is_torch_version
from accelerate.local_sgd import DiLoCo, LocalSGD
from accelerate.strategies import matrix_owners
from accelerate.strategies.dtensors import distribute_like, named_parameters
from accelerate.utils import ExpertParallelConfig, GradientAccumulationPlugin, PipelineConfig

Run = Callable[..., list[Any]]
WHOLE, SHARDS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
CPU = not hasattr(torch, "sim")
slow = pytest.mark.slow
needs_pipelines = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """With tied weights, frozen parameters, and matrices that ranks cannot divide or that are smaller."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(6, 6, bias=False)
        has_experts = "ep" in layout.split()
        self.blocks = nn.ModuleList(Mixture() if has_experts else Block(width) for width in (10, 4, 8, 2))
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
    words = layout.split() if int(os.environ["WORLD_SIZE"]) > 1 else []
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
    return Accelerator(cpu=CPU, parallelism_config=ParallelismConfig(**mesh) if mesh else None, **options)


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "muon":
        others = [p for p in trained if p.ndim == 1]
        matrices = [p for p in model.parameters() if p.ndim == 2]  # frozen ones, too
        muon = torch.optim.Muon(matrices, lr=0.05)
        if batches := [p for p in trained if p.ndim == 3]:  # its constructor refuses them
            muon.add_param_group({"params": batches, "lr": 0.02})
        return [muon, torch.optim.AdamW(others, lr=0.01)]
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
    reference = copy.deepcopy(model).to(accelerator.device)
    if model.leave.weight is model.enter.weight:
        reference.leave.weight = reference.enter.weight  # some devices get new parameters
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
            parameter.grad = distribute_like(values[name].to(parameter.device, copy=True), parameter)


def train(layout: str, name: str, dtype: torch.dtype, num_steps: int = 4) -> Any:
    accelerator, model, optimizers, reference = prepared(layout, name, dtype=dtype)
    plain, batches = optimizers_of(name, reference), []
    if name == "muon" and "ep" in layout:  # on one process the experts are stepped one by one
        group = plain[0].param_groups[1]
        batches = [(batch, list(map(nn.Parameter, batch.detach()))) for batch in group["params"]]
        group["params"] = [expert for _, experts in batches for expert in experts]
    calls: list[Any] = []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **options: calls.append(args) or exchange(*args, **options)
    counts = set()
    for _, values in zip(range(num_steps), gradients(reference), strict=False):
        set_gradients(accelerator, model, values)
        for key, parameter in reference.named_parameters():
            parameter.grad = values[key].to(parameter.device, copy=True) if key in values else None
        calls.clear()
        for optimizer in optimizers:
            optimizer.step()
        counts.add(len(calls))
        for batch, experts in batches:
            for expert, gradient in zip(experts, batch.grad, strict=True):
                expert.grad = gradient
        for optimizer in plain:
            optimizer.step()
    dist.all_to_all_single = exchange
    whole = accelerator.get_state_dict(model)
    expected = reference.state_dict()
    wrong = [name for name, value in whole.items() if not torch.equal(value.cpu(), expected[name].cpu())]
    num_states = len(plain[0].state) - sum(len(experts) - 1 for _, experts in batches)
    return wrong, counts, len(optimizers[0].state), num_states, len(whole)


LAYOUTS = [
    ("ddp", 2),
    ("fsdp2", 2),
    pytest.param("hsdp", 4, marks=slow),
    ("tp", 2),
    pytest.param("ddp", 4, marks=slow),
    pytest.param("fsdp2", 3, marks=slow),
    pytest.param("fsdp2 tp", 4, marks=slow),
    pytest.param("fsdp2 offloaded", 2, marks=slow),
    pytest.param("sharded before", 2, marks=slow),
    pytest.param("ep", 1, marks=slow),
    pytest.param("ep", 2, marks=slow),
    pytest.param("fsdp2 ep", 4, marks=slow),
    pytest.param("pp", 2, marks=[slow, needs_pipelines]),
    pytest.param("fsdp2 pp", 4, marks=[slow, needs_pipelines]),
]
OPTIMIZERS = ["muon", *(pytest.param(name, marks=slow) for name in ("kron", "soap", "shampoo"))]


def num_exchanges(layout: str) -> int:
    """Returns the number of all-to-alls of a step."""
    if layout == "pp":
        return 0  # each parameter is on one rank
    return 1 if layout == "ddp" else 2  # owners have whole parameters under DDP


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
        assert counts == {num_exchanges(layout) if processes > 1 else 0}
    states = sum(held for _, _, held, _, _ in results)
    assert states == results[0][3]  # each state is on one rank


def step(accelerator: Any, model: Any, optimizers: list[Any], values: dict[str, Tensor]) -> None:
    set_gradients(accelerator, model, values)
    for optimizer in optimizers:
        optimizer.step()


def whole_weights(accelerator: Any, model: Any) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in accelerator.get_state_dict(model).items()}


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
        weights.append(whole_weights(accelerator, model))
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
    return whole_weights(accelerator, model), num_states


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("layout", "kind", "others"),
    [
        (("fsdp2", 2), SHARDS, [("one", 1), ("fsdp2", 3), ("ddp", 2)]),
        pytest.param(("ddp", 2), WHOLE, [("one", 1), ("fsdp2", 2), ("ddp", 3)], marks=slow),
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


def train_loop(layout: str) -> Any:
    """Trains with accumulation, clipping and schedulers on the same rows on all ranks, and on one process."""
    accelerator = accelerator_of(layout, gradient_accumulation_steps=2)
    model = Net(layout)
    reference = copy.deepcopy(model)
    optimizers, plain = optimizers_of("muon", model), optimizers_of("muon", reference)
    schedulers, plain_schedulers = (
        [torch.optim.lr_scheduler.LambdaLR(each, lambda number: 1 / (1 + number)) for each in some]
        for some in (optimizers, plain)
    )
    model, *prepared = accelerator.prepare(model, *optimizers, *schedulers)
    optimizers, schedulers = prepared[:2], prepared[2:]
    for number in range(6):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
            for each in (*optimizers, *schedulers):
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        (reference(rows).square().mean() / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type=float("inf"))
            for each in plain:
                each.step()
                each.zero_grad()
            for scheduler in plain_schedulers:
                for _ in range(accelerator.num_processes):
                    scheduler.step()
    whole, expected = accelerator.get_state_dict(model), reference.state_dict()
    changed = not torch.equal(expected["small.weight"], Net(layout).small.weight)
    return [name for name in whole if not torch.equal(whole[name], expected[name])], changed


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp", marks=slow)])
def test_a_training_loop_equals_that_of_one_process(run: Run, layout: str) -> None:
    for wrong, has_changed in run(train_loop, layout):
        assert not wrong
        assert has_changed  # the matrix with an empty shard


def change_parameters(layout: str) -> Any:
    """Prepares the optimizer first, freezes, adds and removes parameters, and loads a whole state."""
    accelerator = accelerator_of(layout)
    model = Net(layout)
    reference = copy.deepcopy(model)
    names = ["blocks.0.up.weight", "blocks.0.down.weight", "blocks.2.up.weight"]
    (optimizer, plain) = (Kron([each.get_parameter(name) for name in names]) for each in (model, reference))
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    inner, late = accelerator.unwrap_model(model), "blocks.3.up.weight"
    for number, values in zip(range(6), gradients(reference), strict=False):
        set_gradients(accelerator, model, values)
        for name, parameter in reference.named_parameters():
            parameter.grad = values[name].clone() if name in values else None
        for each, of in ((optimizer, inner), (plain, reference)):
            if number == 2:
                each.add_param_group({"params": [of.get_parameter(late)], "lr": 0.1})
            if number == 3:  # changes the positions of the others
                each.state.pop(each.param_groups[0]["params"].pop(0), None)
            frozen = names[1:2] if number == 2 else names[:1] if number > 2 else []
            for name in names:
                parameter = of.get_parameter(name).requires_grad_(name not in frozen)
                # The gradient of the backward before it was frozen is stepped once.
                parameter.grad = parameter.grad if parameter.requires_grad or number == 2 else None
            each.step()
        if number == 4:
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    whole, expected = accelerator.get_state_dict(model), reference.state_dict()
    return [name for name in whole if not torch.equal(whole[name], expected[name])], len(optimizer.state)


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp", marks=slow)])
def test_parameters_are_added_and_frozen_in_training(run: Run, layout: str) -> None:
    results = run(change_parameters, layout)
    assert [wrong for wrong, _ in results] == [[], []]
    assert sum(num_states for _, num_states in results) >= 3


def resume_with_an_added_group(layout: str) -> bool:
    weights = []
    for number in range(2):
        accelerator = accelerator_of(layout)
        net = Net(layout)
        model, muon = accelerator.prepare(net, torch.optim.Muon([net.enter.weight], lr=0.1))
        muon.add_param_group({"params": [accelerator.unwrap_model(model).small.weight]})
        for step in (0, 1) if number == 0 else (1,):
            if step == 1 and number == 1:
                accelerator.load_state("checkpoint")
            model(torch.ones(4, 6) + step).square().mean().backward()
            muon.step()
            model.zero_grad()
            if step == 0:
                accelerator.save_state("checkpoint")
        weights.append(copy.deepcopy(accelerator.get_state_dict(model)))
    return all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp", marks=slow)])
def test_a_run_resumes_after_a_group_is_added(run: Run, layout: str) -> None:
    assert run(resume_with_an_added_group, layout) == [True, True]


class Failing(torch.optim.SGD):
    """Optimizer whose second step raises an error on one rank, after the update."""

    whole_matrices = True
    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        super().step()
        if self.num_steps == 2 and os.environ["RANK"] == "1":
            raise ArithmeticError


def fail_in_a_step(layout: str) -> tuple[list[str], bool]:
    # The rank that fails does not compare its weights with those of the others.
    accelerator = accelerator_of(
        layout, gradient_accumulation_plugin=GradientAccumulationPlugin(check_replicas=False)
    )
    plain, model = Net(layout), Net(layout)
    reference = Failing(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, Failing(model.parameters(), lr=0.1))
    failed = False
    for number in range(3):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        for stepped, net in ((reference, plain), (optimizer, model)):
            net(rows).square().mean().backward()
            try:
                stepped.step()
            except ArithmeticError:
                failed = True
            stepped.zero_grad()
    whole, expected = accelerator.get_state_dict(model), plain.state_dict()
    return [name for name in whole if not torch.equal(whole[name], expected[name])], failed


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=slow)])
def test_ranks_stay_equal_if_the_step_of_one_fails(run: Run, layout: str) -> None:
    assert run(fail_in_a_step, layout) == [([], False), ([], True)]


def refuse() -> list[str]:
    accelerator, model, (muon, _), _ = prepared("ddp", "muon")
    texts = []
    for options in ({"closure": lambda: torch.zeros(())}, {}):
        muon.is_joined = not options
        with pytest.raises(StateError) as error:
            muon.step(**options)
        texts.append(str(error.value))
    with pytest.raises(StateError) as direct:
        muon.optimizer.step()
    muon.is_joined = False
    model(torch.ones(4, 6)).sum().backward()
    muon.step()
    with mock.patch.object(matrix_owners.logger, "warning_once") as warn:
        accelerator.save_state("checkpoint")
        assert not warn.call_count
        saved = [muon.state_dict()]
        assert "those that this rank owns" in warn.call_args.args[0]
    dist.broadcast_object_list(saved, 0)
    accelerator.prepare(muon.optimizer).step()  # prepared again, while the first one is in use
    with pytest.raises(StateError) if dist.get_rank() else nullcontext() as foreign:
        muon.load_state_dict(saved[0])
    for kind in (LocalSGD, DiLoCo):
        with pytest.raises(PreparationError) as unfit, kind(accelerator, model, 2):
            pass
        texts.append(str(unfit.value))
    return [*texts, str(direct.value), str(foreign and foreign.value)]


@slow
def test_steps_that_not_all_ranks_take_are_refused(run: Run) -> None:
    for rank, (closure, joined, local, outer, direct, foreign) in enumerate(run(refuse)):
        assert "Prepare the optimizer with whole_matrices=False" in local
        assert outer == local.replace("LocalSGD", "DiLoCo")
        assert "Call step() without it" in closure
        assert "Use even_batches or windows()" in joined
        assert "Call step() of the optimizer that prepare() returned" in direct
        assert ("states of matrices that ranks [0] own" in foreign) == (rank == 1)


def refuse_flat() -> list[str]:
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
    )
    model = Net("ddp").requires_grad_(True)
    with pytest.raises(PreparationError) as error:
        accelerator.prepare(model, optimizers_of("muon", model)[0])
    return [str(error.value)]


@slow
def test_flat_parameters_are_refused(run: Run) -> None:
    for (text,) in run(refuse_flat):
        assert "Use DistributedDataParallel, FSDP 2 (fsdp_version=2)" in text
