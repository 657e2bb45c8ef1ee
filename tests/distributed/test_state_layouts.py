"""Optimizer states of other shapes than their distributed parameters are loaded as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import CheckpointError
from accelerate.state import AcceleratorState, GradientState

Run = Callable[..., list[Any]]
WAYS = ("full", "shards", "tp")


class Factored(torch.optim.Optimizer):
    """Optimizer with states of many shapes."""

    partial = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        own = self.state.setdefault("run", {"steps": 0, "decay": torch.ones(())})  # type: ignore[call-overload]
        own["steps"] += 1
        own["decay"] *= 0.9
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter, float(own["decay"]))
        if self.partial:
            first = self.param_groups[0]["params"][0]
            self.state[first]["sum"] = DTensor.from_local(torch.ones(2), first.device_mesh, [Partial()])

    def update(self, parameter: Any, decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        square = gradient.square() + 1e-8
        whole = (
            square.redistribute(placements=[Replicate()] * square.device_mesh.ndim)
            if isinstance(square, DTensor)
            else square
        )
        new = {
            "element": square,
            "whole": whole,
            "rows": whole.mean(-1, keepdim=True) if square.ndim > 1 else square,
            "row": whole.mean(-1),
            "norm": whole.sum().sqrt(),
        }
        if isinstance(square, DTensor) and square.ndim > 1:  # sharded like the parameter
            new["rows"] = (
                new["rows"].redistribute(placements=square.placements)
                if all(placement.is_replicate() or placement.is_shard(0) for placement in square.placements)
                else new["rows"]
            )
        for key, value in new.items():
            state[key] = value if key not in state else state[key] * decay + value * (1 - decay)
        state.setdefault("plain", torch.zeros(parameter.shape[0], 1)).add_(decay)
        state.setdefault("mask", torch.ones(parameter.shape)).mul_(decay)
        scale = state["rows"] + state["norm"] + float(state["plain"].sum()) + float(state["mask"].sum())
        change = gradient / (scale + state["element"].sqrt() + state["whole"]) * decay
        if isinstance(change, DTensor):
            change = change.redistribute(placements=parameter.placements)
        parameter.sub_(change)


class Net(nn.Module):
    tp_plan = _tp_plan = {"first": "colwise", "second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 2)

    @property
    def tp_size(self) -> int:
        return 2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.first(inputs).tanh())
        return hidden


def start(way: str, dtype: torch.dtype = torch.float32) -> tuple[Accelerator, nn.Module, Any]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    options: dict[str, Any] = {}
    if way == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=2)
    elif way != "whole":
        kind = "FULL_STATE_DICT" if way == "full" else "SHARDED_STATE_DICT"
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator = Accelerator(**options)
    torch.manual_seed(0)
    model = Net().to(dtype)
    model, optimizer = accelerator.prepare(model, Factored(model.parameters()))
    return accelerator, model, optimizer


def train(run: tuple[Accelerator, nn.Module, Any], steps: range) -> list[torch.Tensor]:
    accelerator, model, optimizer = run
    for step in steps:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights: list[Any] = [parameter.detach().clone() for parameter in model.parameters()]
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]


def states(optimizer: Any) -> list[tuple[str, Any]]:
    parameters = optimizer.param_groups[0]["params"]
    return [item for key in ("run", *parameters) for item in sorted(optimizer.state[key].items())]


def describe(optimizer: Any) -> list[Any]:
    """The type, the placements and the value of each state."""
    return [
        (
            key,
            type(value),
            getattr(value, "placements", None),
            (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).tolist(),
        )
        for key, value in states(optimizer)
    ]


def interrupt(ways: list[str]) -> list[str]:
    """Continues in the same objects, and in new ones of each way."""
    wrong = []
    for way in ways:
        run = start(way)
        train(run, range(3))
        run[0].save_state(f"saved_{way}")
        saved = describe(run[2])
        expected = train(run, range(3, 6))
        for resumed in (run, start(way)):
            resumed[0].load_state(f"saved_{way}")
            loaded = describe(resumed[2])
            wrong += [
                f"{way}: {own} became {new}" for own, new in zip(saved, loaded, strict=True) if own != new
            ]
            if not all(map(torch.equal, train(resumed, range(3, 6)), expected)):
                wrong.append(f"{way}: other weights")
    return wrong


def load(folder: str, ways: list[str]) -> dict[str, Any]:
    """Loads checkpoints of another world size or another parallelism, and continues."""
    found: dict[str, Any] = {}
    for saved in WAYS:
        for way in ways:
            run = start(way)
            try:
                run[0].load_state(f"{folder}/saved_{saved}", world_size_policy="ignore")
                found[f"{saved} -> {way}"] = train(run, range(3, 6))
            except CheckpointError as error:
                found[f"{saved} -> {way}"] = str(error)
    return found


def refuse() -> list[str]:
    texts = []
    for way in ("full", "shards"):
        run = start(way)
        run[2].optimizer.partial = True
        train(run, range(1))
        try:
            run[0].save_state(f"refused_{way}")
        except CheckpointError as error:
            texts.append(str(error))
    return texts


def interrupt_and_refuse() -> tuple[list[str], list[str], str]:
    return interrupt(list(WAYS)), refuse(), str(Path.cwd())


def test_states_of_other_shapes_are_loaded_as_they_were(run: Run) -> None:
    results = run(interrupt_and_refuse)
    assert [result[0] for result in results] == [[], []]
    assert all("'sum' of parameter" in text and "Partial" in text for text in results[0][1])
    assert len(results[0][1]) == 2
    folder = results[0][2]
    one = run(load, folder, ["full", "whole"], processes=1)[0]
    three = run(load, folder, ["shards"], processes=3)[0]
    two = run(load, folder, ["full", "tp"])[0]
    found: dict[str, Any] = {**one, **three, **two}
    for key in (
        "full -> tp",
        "shards -> tp",
    ):  # a state of the rows of a matrix whose columns are sharded now
        assert "layout =0, which is not defined for its parameter" in found.pop(key)
    expected = two["full -> full"]
    for key, weights in found.items():
        assert not isinstance(weights, str), (key, weights)
        for weight, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, other, msg=lambda text, key=key: f"{key}: {text}")


def load_from_whole() -> str:
    run = start("whole")
    train(run, range(3))
    run[0].save_state("saved_whole")
    resumed = start("full")
    try:
        resumed[0].load_state("saved_whole")
    except CheckpointError as error:
        return str(error)
    return ""


def test_states_of_unknown_layout_are_refused(run: Run) -> None:
    assert all("The checkpoint does not say how it is distributed" in text for text in run(load_from_whole))


def clip(way: str) -> tuple[Any, list[Any]]:
    AcceleratorState._reset_state(True)
    accelerator, model, _ = start(way, torch.float64)
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    accelerator.backward((model(inputs) * 1e3).square().mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return norm, [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]


def clip_all() -> list[Any]:
    return [clip(way) for way in ("whole", "full", "tp")]


def test_gradients_of_float64_are_clipped_in_float64(run: Run) -> None:
    (norm, expected), *others = run(clip_all)[0]
    for other, gradients in others:
        assert other.dtype == torch.float64
        torch.testing.assert_close(other, norm, rtol=1e-13, atol=0)
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=0)
