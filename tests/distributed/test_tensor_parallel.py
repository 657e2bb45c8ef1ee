"""Models of transformers are shared by the plans that they bring, and train as on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import PreparationError, StateError

Run = Callable[..., list[Any]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "pad_token_id": 0,
}


def train(name: str, mesh: dict[str, int], ties: bool, sharded: bool = False) -> tuple[list[float], float]:
    transformers = pytest.importorskip("transformers")
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module"
    )  # the logits are a view; they are not written to
    more = {"head_dim": 8} if name == "Qwen3" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more, tie_word_embeddings=ties)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(1, 30, (2, 8), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(accelerator.device)
    losses, norm = [], 0.0
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norm


@pytest.mark.parametrize(
    ("name", "mesh", "ties", "sharded"),
    [
        ("Llama", {"tp_size": 2}, False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("Llama", {"tp_size": 2}, True, False),
                ("Qwen3", {"tp_size": 2}, False, False),
                ("Qwen3", {"tp_size": 2}, True, False),
                ("Mistral", {"tp_size": 2}, False, False),
                ("Llama", {"tp_size": 2, "dp_shard_size": 2}, True, True),
                ("Llama", {"tp_size": 2, "dp_replicate_size": 2}, False, False),
            ]
        ),
    ],
)
def test_losses_are_those_of_one_process(
    run: Run, name: str, mesh: dict[str, int], ties: bool, sharded: bool
) -> None:
    pytest.importorskip("transformers")
    processes = 2 * mesh.get("dp_shard_size", 1) * mesh.get("dp_replicate_size", 1)
    (losses, norm), *_ = run(train, name, {}, ties, processes=1)
    for found, found_norm in run(train, name, mesh, ties, sharded, processes=processes, timeout=180):
        assert found == pytest.approx(losses, abs=1e-5)
        assert found_norm == pytest.approx(norm, abs=1e-4)


class Layers(torch.nn.Module):
    """Two layers that ranks share, between two that each rank has whole."""

    tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.up = torch.nn.Linear(4, 6), torch.nn.Linear(6, 8)
        self.down, self.last = torch.nn.Linear(8, 6), torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.up(self.first(x)).tanh()))


def train_layers(mesh: dict[str, int], options: dict[str, bool], folder: str) -> list[float]:
    """Four updates of two micro-batches with sums as losses; the state is saved and loaded between."""
    config = ParallelismConfig(**mesh) if mesh else None
    accelerator = Accelerator(parallelism_config=config, gradient_accumulation_steps=2)
    model = Layers()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1, **options))  # type: ignore[arg-type]
    x = torch.arange(12.0, device=accelerator.device).view(3, 4) / 12
    losses = []
    for round_ in range(8):
        with accelerator.accumulate(model, num_items=3):
            loss = model(x).square().sum()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if round_ == 3:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"foreach": True}, marks=pytest.mark.slow),
        pytest.param({"fused": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_optimizer_steps_layers_that_are_shared_and_whole_ones(
    run: Run, options: dict[str, bool], tmp_path: Path
) -> None:
    (expected,) = run(train_layers, {}, options, str(tmp_path / "one"), processes=1)
    for found in run(train_layers, {"tp_size": 2}, options, str(tmp_path / "two")):
        assert found == pytest.approx(expected, abs=1e-4)


def train_adapter(config: dict[str, int] | None, adapter: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")  # peft reads what transformers deprecates
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ties = adapter.pop("ties", False)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=ties)
    )
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(**{"r": 2, "target_modules": targets, "init_lora_weights": False, **adapter})
    model = peft.get_peft_model(model, lora)
    options = {} if config is None else {"parallelism_config": ParallelismConfig(**config)}
    accelerator = Accelerator(cpu=True, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.5))
    except PreparationError as error:
        return str(error)
    ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_adapters_are_sharded_with_their_layers(run: Run) -> None:
    pytest.importorskip("peft")
    adapters: list[dict[str, Any]] = [
        {},
        {"target_modules": ["q_proj", "lm_head"], "ties": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ]
    (one,) = run(call_for_each, train_adapter, [(None, adapter) for adapter in adapters], processes=1)
    cases = [({"tp_size": 2}, adapter) for adapter in adapters]
    for found in run(call_for_each, train_adapter, cases, timeout=120):
        for adapter, (losses, weights), (expected, state) in zip(adapters, found, one, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), adapter
            for name, value in weights.items():
                torch.testing.assert_close(value, state[name], msg=f"{name} with {adapter}")


def test_an_adapter_that_cannot_be_sharded_is_refused(run: Run) -> None:
    pytest.importorskip("peft")
    for refused in run(train_adapter, {"tp_size": 2}, {"use_dora": True}, processes=2):
        assert "has an adapter that cannot be sharded" in refused


class Scaled(Layers):
    """A scale of the part of a rank, or of whole values, before dropout."""

    def __init__(self, is_inside: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.is_inside, self.dropout = is_inside, torch.nn.Dropout(dropout)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, outer = (self.scale, 1.0) if self.is_inside else (1.0, self.scale)
        hidden = self.down((self.up(self.dropout(self.first(x))) * inner).tanh())
        return self.last(hidden * outer)


def compare_gradients(mesh: dict[str, int], is_sharded: bool, is_inside: bool) -> None:
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(**mesh),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if is_sharded else None,
    )
    x = torch.arange(12.0, device=accelerator.device).view(3, 4) / 12
    accelerator.backward(accelerator.prepare(Scaled(is_inside=False))(x).square().sum())
    model = accelerator.prepare(Scaled(is_inside=is_inside, dropout=0.0 if is_inside else 0.5))
    torch.manual_seed(accelerator.process_index)
    loss = model(x).square().sum()
    message = "Ranks of tensor parallelism have different gradients of "
    with pytest.raises(StateError, match=f"{message}.*{'scale' if is_inside else 'first.weight'}"):
        accelerator.backward(loss)


@pytest.mark.parametrize(
    ("mesh", "is_sharded", "is_inside"),
    [
        ({"tp_size": 2}, False, True),
        ({"tp_size": 2}, False, False),
        pytest.param({"tp_size": 2, "dp_replicate_size": 2}, False, True, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "dp_shard_size": 2}, True, True, marks=pytest.mark.slow),
    ],
)
def test_different_gradients_of_whole_parameters_are_refused(
    run: Run, mesh: dict[str, int], is_sharded: bool, is_inside: bool
) -> None:
    run(compare_gradients, mesh, is_sharded, is_inside, processes=2 * len(mesh))


def train_last(kind: str) -> list[float] | str:
    """Trains with the columns of the last layer on different ranks, or on one process."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2) if kind != "one" else None)
    model: Any = Layers()
    model.last = torch.nn.Linear(6, 4)
    whole_loss = ColwiseParallel(use_local_output=False)
    model.tp_plan = {"last": {"part": "colwise", "gathered": "colwise_rep"}.get(kind, whole_loss)}
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
    x = torch.arange(12.0, device=accelerator.device).view(3, 4) / 12
    labels = torch.zeros(3, dtype=torch.long, device=accelerator.device)
    losses = []
    for _ in range(3):
        with loss_parallel() if kind == "loss_parallel" else nullcontext():
            loss = torch.nn.functional.cross_entropy(model(x), labels)
            try:
                accelerator.backward(loss)
            except StateError as error:
                return str(error)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def test_a_loss_of_a_part_of_the_outputs_is_refused_and_one_over_all_parts_is_not(run: Run) -> None:
    ((expected,),) = run(call_for_each, train_last, [("one",)], processes=1)
    for part, gathered, parallel in run(
        call_for_each, train_last, [("part",), ("gathered",), ("loss_parallel",)]
    ):
        assert "compute different losses of the same batch (" in part
        assert "use 'colwise_gather_output'" in part
        assert gathered == pytest.approx(expected, abs=1e-5)
        assert parallel == pytest.approx(expected, abs=1e-5)


def penalize(kind: str) -> str:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2) if kind == "plan" else None)
    device = accelerator.device
    model: Any = Layers().to(device)
    if kind == "before":
        mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = accelerator.prepare(model)
    x = torch.ones(3, 4, device=device, requires_grad=True)
    with pytest.raises(StateError) as error:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return str(error.value)


@pytest.mark.parametrize("kind", ["plan", "before"])
def test_a_gradient_penalty_is_refused(run: Run, kind: str) -> None:
    assert all("create_graph=True" in text for text in run(penalize, kind))


class Words(torch.nn.Module):
    tp_plan = {"rows": "rowwise", "columns": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.columns = torch.nn.Embedding(8, 4), torch.nn.Embedding(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows(tokens) + self.columns(tokens)


def embed(mesh: dict[str, int]) -> torch.Tensor:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**mesh) if mesh else None)
    tokens = torch.arange(8, device=accelerator.device).view(2, 4)
    return accelerator.prepare(Words())(tokens).detach().cpu()


def test_embeddings_have_whole_inputs_and_outputs(run: Run) -> None:
    (expected,) = run(embed, {}, processes=1)
    for found in run(embed, {"tp_size": 2}):
        torch.testing.assert_close(found, expected)


class Wrapping(torch.optim.Optimizer):
    """It has the groups and states of another optimizer, and does not call the constructor of torch."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.defaults = base, base.defaults
        self.param_groups, self.state = base.param_groups, base.state
        self._optimizer_step_pre_hooks = base._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = base._optimizer_step_post_hooks

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def train_wrapped(mesh: dict[str, int]) -> list[float]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**mesh) if mesh else None)
    model: Any = Layers()
    optimizer: Any = Wrapping(torch.optim.Adam(model.parameters(), 0.1))
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.arange(12.0, device=accelerator.device).view(3, 4) / 12
    losses = []
    for _ in range(3):
        loss = model(x).square().sum()
        accelerator.backward(loss)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_optimizer_that_wraps_another_steps_shards(run: Run) -> None:
    (expected,) = run(train_wrapped, {}, processes=1)
    for found in run(train_wrapped, {"tp_size": 2}):
        assert found == pytest.approx(expected, abs=1e-4)
