"""Models whose experts are sharded by `ep_size` train as on one process, with DDP and with FSDP 2."""

from __future__ import annotations

import logging
import warnings
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.stand_ins.cases import call_for_each
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import PreparationError, compare_versions, is_torch_version
from accelerate.strategies.axes import ExpertAxis
from accelerate.utils import ActivationCheckpointing, DistributedDataParallelKwargs, ExpertParallelConfig

Run = Callable[..., list[Any]]
BATCH, STEPS, EXACT = 8, 4, 1e-6
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}


class Experts(nn.Module):
    """Experts of one layer, with the interface that `ExpertParallelConfig` documents."""

    def __init__(self, num_experts: int, size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(num_experts, size, 2 * size))
        self.bias = nn.Parameter(0.3 * torch.randn(num_experts, 2 * size))
        self.down = nn.Parameter(0.3 * torch.randn(num_experts, 2 * size, size))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            rows, choices = torch.where(chosen == expert)
            hidden = torch.relu(tokens[rows] @ self.up[expert] + self.bias[expert]) @ self.down[expert]
            output = output.index_add(0, rows, (hidden * weights[rows, choices, None]).to(output.dtype))
        return output


class Layer(nn.Module):
    def __init__(self, num_experts: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.wide, self.narrow = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.router = nn.Linear(size, num_experts, bias=False)
        self.experts = Experts(num_experts, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x + self.narrow(torch.relu(self.wide(x))))
        weights, chosen = torch.topk(torch.softmax(self.router(tokens), -1), 2)
        mixed: torch.Tensor = self.experts(tokens, chosen, weights)
        return x + mixed


class Net(nn.Module):
    tp_plan = {"layers.*.wide": "colwise", "layers.*.narrow": "rowwise", "layers.*.experts": "moe"}

    def __init__(self, num_experts: int = 4, size: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_experts, size) for _ in range(2))
        self.head = nn.Linear(size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def are_experts(module: nn.Module) -> bool:
    return isinstance(module, Experts)


def make_accelerator(sizes: dict[str, int], **options: Any) -> Accelerator:
    """Returns the accelerator of a layout, which has FSDP 2 if it contains "fsdp"."""
    sizes = dict(sizes)
    plugin = None
    options.setdefault("layers", ["Layer"] if options.get("is_experts", are_experts) else None)
    if sizes.pop("fsdp", 0):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=options.pop("layers", None),
            cpu_ram_efficient_loading=bool(sizes.pop("efficient", 0)),
            activation_checkpointing=bool(sizes.pop("recompute", 0)),
        )
    options.pop("layers", None)
    handler = ExpertParallelConfig(is_experts=options.pop("is_experts", are_experts))
    mesh = ParallelismConfig(**sizes, ep_handler=handler) if sizes else None
    return Accelerator(cpu=True, split_batches=True, fsdp_plugin=plugin, parallelism_config=mesh, **options)


def build(
    accelerator: Accelerator, num_experts: int = 4, kind: Any = torch.optim.SGD
) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net(num_experts)
    rows = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    data = [(row, index % 3) for index, row in enumerate(rows)]
    optimizer = kind(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=BATCH)  # type: ignore[arg-type]
    return accelerator.prepare(model, optimizer, loader)  # type: ignore[no-any-return]


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def step_through(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any
) -> list[tuple[float, float]]:
    found = []
    for rows, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else 0.0
            optimizer.step()
            optimizer.zero_grad()
        found.append((float(accelerator.reduce(loss.detach(), "mean")), float(norm)))
    return found


def train(sizes: dict[str, int], num_experts: int = 4, steps: int = 1) -> dict[str, Any]:
    accelerator = make_accelerator(sizes, gradient_accumulation_steps=steps)
    model, optimizer, loader = build(accelerator, num_experts)
    history = step_through(accelerator, model, optimizer, loader)
    numbers = accelerator.prepare(DataLoader(range(13), batch_size=4))  # type: ignore[arg-type]
    return {
        "history": history,
        "metrics": [n for batch in numbers for n in accelerator.gather_for_metrics(batch).tolist()],
        "weights": {name: whole(value) for name, value in model.state_dict().items()},
        "state": accelerator.get_state_dict(model),
        "local": sum(_local(p).numel() for name, p in model.named_parameters() if "experts" in name),
    }


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"] == list(range(13))
    torch.testing.assert_close(found["history"], expected["history"], atol=EXACT, rtol=EXACT)
    assert list(found["weights"]) == list(expected["weights"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, atol=EXACT, rtol=EXACT)


FAST: list[tuple[dict[str, int], int]] = [({"ep_size": 2}, 2), ({"ep_size": 2, "fsdp": 1}, 2)]
SLOW: list[tuple[dict[str, int], int]] = [
    ({"ep_size": 4}, 4),
    ({"ep_size": 4, "fsdp": 1}, 4),
    ({"ep_size": 2, "dp_replicate_size": 2}, 4),
    ({"ep_size": 2, "dp_shard_size": 2, "fsdp": 1}, 4),
    ({"ep_size": 2, "dp_replicate_size": 2, "fsdp": 1}, 4),
    ({"ep_size": 2, "dp_shard_size": 2, "fsdp": 1, "efficient": 1}, 4),
    ({"ep_size": 2, "tp_size": 2, "fsdp": 1}, 4),
    ({"ep_size": 2, "tp_size": 2}, 4),
]
LAYOUTS = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep_size": 2, "dp_shard_size": 2, "fsdp": 1}, {"ep_size": 2}])
def test_experts_of_a_rank_are_sharded_unevenly(run: Run, sizes: dict[str, int]) -> None:
    (expected,) = run(train, {}, 6, 2, processes=1)
    for each in run(train, sizes, 6, 2, processes=2 * sizes.get("dp_shard_size", 1), timeout=180):
        assert_equal(each, expected)


@pytest.mark.parametrize(("sizes", "processes"), LAYOUTS)
def test_training_is_that_of_one_process(run: Run, sizes: dict[str, int], processes: int) -> None:
    (expected,) = run(train, {}, processes=1)
    found = run(train, sizes, processes=processes, timeout=180)
    for each in found:
        assert_equal(each, expected)
    copies = sizes.get("dp_replicate_size", 1) * sizes.get("tp_size", 1)
    assert sum(each["local"] for each in found) == expected["local"] * copies
    for name, value in expected["state"].items():  # whole on the first rank
        torch.testing.assert_close(found[0]["state"][name], value, atol=EXACT, rtol=EXACT)


# Models of transformers


def add_adapters(model: Any) -> Any:
    """Adds adapters with random weights to a model, whose own weights are frozen."""
    peft = pytest.importorskip("peft")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def train_family(name: str, sizes: dict[str, int], option: str, steps: int = 1) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    accelerator = make_accelerator(sizes, is_experts=None, gradient_accumulation_steps=steps)
    is_seeded = sizes.get("fsdp") and not sizes.get("efficient")  # otherwise ranks get the weights of rank 0
    torch.manual_seed(0 if is_seeded else accelerator.process_index)
    more = {"output_router_logits": True} if option == "auxiliary" else {}
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[name], **more})
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if option == "adapters":
        model = add_adapters(model)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    ids = torch.randint(3, 64, (STEPS * BATCH, 12), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(ids, batch_size=BATCH // steps)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    history, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = accelerator.forward_backward(model, {"input_ids": batch, "labels": batch})
            losses.append(accelerator.reduce(loss, "mean"))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                history.append((float(torch.stack(losses).mean()), float(norm)))
                losses.clear()
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return {"history": history, "weights": weights, "metrics": list(range(13))}


FAMILY_CASES = [
    ("Mixtral", {"ep_size": 2}, 2, ""),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *((name, {"ep_size": 2}, 2, "") for name in FAMILIES if name != "Mixtral"),
            *((name, {"ep_size": 2, "fsdp": 1}, 2, "") for name in FAMILIES),
            *((name, {"ep_size": 4}, 4, "") for name in FAMILIES),
            *((name, {"ep_size": 4, "fsdp": 1}, 4, "") for name in FAMILIES),
            ("Qwen3Moe", {"ep_size": 2, "dp_shard_size": 2, "fsdp": 1, "efficient": 1}, 4, ""),
            ("Mixtral", {"ep_size": 2}, 2, "auxiliary"),
            ("Mixtral", {"ep_size": 2, "fsdp": 1}, 2, "auxiliary"),
            *((name, {"pp_size": 2, "ep_size": 2}, 4, "") for name in FAMILIES),
            *((name, {"pp_size": 2, "ep_size": 2, "fsdp": 1}, 4, "") for name in FAMILIES),
            ("Qwen3Moe", {"ep_size": 2}, 2, "adapters"),
            ("Qwen3Moe", {"ep_size": 2, "fsdp": 1}, 2, "adapters"),
        ]
    ),
]


@pytest.mark.skipif(
    compare_versions("transformers", "<", "5.23"),
    reason="models of this transformers have no plan of experts",
)
@pytest.mark.parametrize(("name", "sizes", "processes", "option"), FAMILY_CASES)
def test_models_of_transformers_train_as_on_one_process(
    run: Run, name: str, sizes: dict[str, int], processes: int, option: str
) -> None:
    pytest.importorskip("transformers")
    # A load balancing loss is not linear: that of a rank is the loss of its part of the batch.
    steps = processes if option == "auxiliary" else 1
    (expected,) = run(train_family, name, {}, option, steps, processes=1, timeout=180)
    for found in run(train_family, name, sizes, option, processes=processes, timeout=240):
        has_stages = "pp_size" in sizes  # a rank has the weights of its stage
        weights = {key: expected["weights"][key] for key in found["weights"]} if has_stages else {}
        assert_equal(found, {**expected, "weights": weights or expected["weights"]})


# Checkpoints


def save(sizes: dict[str, int], folder: Path, kind: str) -> None:
    """Saves after an epoch, trains on, loads, and trains the same steps again."""
    accelerator = make_accelerator(sizes)
    model, optimizer, loader = build(accelerator, 4, OPTIMIZERS[kind])
    step_through(accelerator, model, optimizer, loader)
    accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, folder / "model")
    first = step_through(accelerator, model, optimizer, loader)
    accelerator.load_state(str(folder / "state"))
    assert step_through(accelerator, model, optimizer, loader) == first


def resume(sizes: dict[str, int], folder: Path, kind: str) -> dict[str, Any]:
    accelerator = make_accelerator(sizes)
    model, optimizer, loader = build(accelerator, 4, OPTIMIZERS[kind])
    accelerator.load_state(str(folder / "state"))
    saved = load_file(folder / "model" / "model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole(value), saved[name], atol=0, rtol=0)
    history = step_through(accelerator, model, optimizer, loader)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return {"history": history, "weights": weights, "metrics": list(range(13))}


def train_twice(kind: str) -> dict[str, Any]:
    accelerator = make_accelerator({})
    model, optimizer, loader = build(accelerator, 4, OPTIMIZERS[kind])
    step_through(accelerator, model, optimizer, loader)
    history = step_through(accelerator, model, optimizer, loader)
    return {"history": history, "weights": model.state_dict(), "metrics": list(range(13))}


OPTIMIZERS: dict[str, Any] = {
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": partial(
        torch.optim.Adagrad, initial_accumulator_value=0.1
    ),  # creates its state in the constructor
}
CHECKPOINTS: list[Any] = [
    ({"ep_size": 2}, 2, {"ep_size": 2, "fsdp": 1}, 2, "momentum"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ({"ep_size": 2, "fsdp": 1}, 2, {}, 1, "momentum"),
            ({"ep_size": 2, "dp_shard_size": 2, "fsdp": 1}, 4, {"ep_size": 4, "fsdp": 1}, 4, "momentum"),
            ({"ep_size": 4}, 4, {"ep_size": 2, "dp_shard_size": 2, "fsdp": 1}, 4, "adagrad"),
            ({"ep_size": 2, "dp_shard_size": 2, "fsdp": 1}, 4, {"dp_shard_size": 2, "fsdp": 1}, 2, "adagrad"),
            ({}, 1, {"ep_size": 2, "dp_replicate_size": 2, "fsdp": 1}, 4, "momentum"),
        ]
    ),
]


@pytest.mark.parametrize(("sizes", "processes", "others", "other_processes", "kind"), CHECKPOINTS)
def test_checkpoints_load_on_the_same_and_on_another_layout(
    run: Run,
    tmp_path: Path,
    sizes: dict[str, int],
    processes: int,
    others: dict[str, int],
    other_processes: int,
    kind: str,
) -> None:
    (expected,) = run(train_twice, kind, processes=1)
    run(save, sizes, tmp_path, kind, processes=processes, timeout=180)
    for found in run(resume, others, tmp_path, kind, processes=other_processes, timeout=180):
        assert_equal(found, expected)


# Recomputation


class TiedRouter(nn.Linear):
    """Router of experts with equal scores, whose choice differs between two forwards of the same batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = array("q", [0])  # that a recomputation does not restore

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.counts[0] += 1
        generator = torch.Generator().manual_seed(self.counts[0])
        noise = torch.randn(len(tokens), self.out_features, generator=generator)
        logits: torch.Tensor = 0 * super().forward(tokens) + 1e-6 * noise
        return logits


def gradients(sizes: dict[str, int], recomputes: bool, save_operators: Any) -> tuple[dict[str, Any], int]:
    handlers = []
    by_plugin = recomputes and sizes.get("fsdp") and not save_operators
    if recomputes and not by_plugin:
        operators = (torch.ops.aten.relu.default,) if save_operators == "relu" else save_operators
        handlers.append(ActivationCheckpointing(save_operators=operators))
    sizes = {**sizes, **({"recompute": 1} if by_plugin else {})}
    accelerator = make_accelerator(sizes, kwargs_handlers=handlers)
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        layer.router = TiedRouter(8, 4, bias=False)
    model = accelerator.prepare(model)
    rows = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1 + accelerator.process_index))
    accelerator.backward(model(rows).square().sum())
    calls = accelerator.unwrap_model(model).layers[0].router.counts[0]
    return {name: whole(p.grad) for name, p in model.named_parameters()}, calls


@pytest.mark.parametrize(
    ("sizes", "save_operators"),
    [
        ({"ep_size": 2}, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ({"ep_size": 2}, "matmul"),
                ({"ep_size": 2}, "relu"),
                ({"ep_size": 2, "fsdp": 1}, None),
                ({"ep_size": 2, "fsdp": 1}, "relu"),
                ({"ep_size": 2, "fsdp": 1}, "matmul"),
            ]
        ),
    ],
)
def test_recomputation_keeps_the_choice_of_experts(
    run: Run, sizes: dict[str, int], save_operators: Any
) -> None:
    cases = [(sizes, False, None), (sizes, True, save_operators)]
    for (same, once), (grads, calls) in run(call_for_each, gradients, cases):
        assert (calls, once) == (2, 1)
        for name, value in same.items():
            torch.testing.assert_close(grads[name], value, atol=1e-4, rtol=1e-4)


# Single features


def run_alone(sizes: dict[str, int]) -> None:
    """Gathers the experts, and runs a different number of forwards on each rank."""
    accelerator = make_accelerator(sizes)
    torch.manual_seed(0)
    model = Net()
    rows = torch.randn(5, 8)
    expected = model(rows).detach()
    model = accelerator.prepare(model)
    layers = accelerator.unwrap_model(model).layers
    before = layers[0].experts.up
    with accelerator.unsharded(model):
        assert len(layers[0].experts.up) == 4
        for _ in range(1 + accelerator.process_index):
            torch.testing.assert_close(model(rows).detach(), expected)
    assert layers[0].experts.up.shape == before.shape
    torch.testing.assert_close(model(rows).detach(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 2, "fsdp": 1}])
def test_gathered_experts_run_without_the_other_ranks(run: Run, sizes: dict[str, int]) -> None:
    run(run_alone, sizes)


def train_on_one_expert(sizes: dict[str, int]) -> dict[str, Any]:
    """Trains with a router that chooses the first two experts, so that other ranks receive no tokens."""
    accelerator = make_accelerator(sizes, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        layer.router = nn.Linear(8, 4)
        layer.router.bias.data.copy_(torch.tensor([20.0, 10.0, -10.0, -20.0]))
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    data = [(row, index % 3) for index, row in enumerate(rows)]
    loader = accelerator.prepare(DataLoader(data, batch_size=BATCH))  # type: ignore[arg-type]
    history = step_through(accelerator, model, optimizer, loader)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return {"history": history, "weights": weights, "metrics": list(range(13))}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 2, "fsdp": 1}])
def test_ranks_without_tokens_and_accumulated_gradients(run: Run, sizes: dict[str, int]) -> None:
    (expected,) = run(train_on_one_expert, {}, processes=1)
    for found in run(train_on_one_expert, sizes):
        assert_equal(found, expected)


class Reader(nn.Module):
    """Attends to the tokens before, and predicts the next token with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, 32), nn.Embedding(16, 32)
        self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.layer, self.out = Layer(4, 32), nn.Linear(32, 17)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        heads = [part(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.heads]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + attended.transpose(1, 2).flatten(-2)
        return self.out(self.layer(hidden.flatten(0, 1)).view_as(hidden))  # type: ignore[no-any-return]


def train_reader(sizes: dict[str, int]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the linear layer of the model returns a view
    by_user = sizes.pop("sharded by the user", 0)
    accelerator = make_accelerator(sizes)
    torch.manual_seed(0)
    model = Reader()
    if by_user:
        fully_shard(model, mesh=accelerator.torch_device_mesh["dp_replicate"])
    rows = torch.randint(17, (16, 17), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    history = []
    for whole_rows in loader:
        tokens, labels = whole_rows[:, :-1].clone(), whole_rows[:, 1:].clone()
        positions = torch.arange(16).expand(len(tokens), -1).clone()
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            guesses = model(tokens, positions)
            loss = nn.functional.cross_entropy(guesses.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        history.append((float(accelerator.reduce(loss.detach(), "mean")), norm))
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return {"history": history, "weights": weights, "metrics": list(range(13))}


@pytest.mark.slow
@pytest.mark.skipif(
    is_torch_version("<", "2.13"), reason="no context parallelism on the CPU before torch 2.13"
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"ep_size": 2, "cp_size": 2},
        {"ep_size": 2, "cp_size": 2, "fsdp": 1},
        {"dp_replicate_size": 2, "cp_size": 2, "sharded by the user": 1},
    ],
)
def test_gradients_are_averaged_over_ranks_that_share_sequences(run: Run, sizes: dict[str, int]) -> None:
    (expected,) = run(train_reader, {}, processes=1)
    for found in run(train_reader, sizes, processes=4, timeout=180):
        assert_equal(found, expected)


def train_from_meta(sizes: dict[str, int]) -> dict[str, Any]:
    """Trains a model whose weights only rank 0 has, with an optimizer that is prepared first."""
    accelerator = make_accelerator(sizes)
    torch.manual_seed(0)
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = Net()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    data = [(row, index % 3) for index, row in enumerate(rows)]
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=BATCH))  # type: ignore[arg-type]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    history = step_through(accelerator, model, optimizer, loader)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return {"history": history, "weights": weights, "metrics": list(range(13))}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 2, "fsdp": 1, "efficient": 1}])
def test_ranks_receive_their_experts_from_rank_0(run: Run, sizes: dict[str, int]) -> None:
    (expected,) = run(train_from_meta, {}, processes=1)
    for found in run(train_from_meta, sizes):
        assert_equal(found, expected)


def save_pretrained(name: str, sizes: dict[str, int], folder: Path) -> None:
    """Saves a model of transformers before and after it is prepared."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    accelerator = make_accelerator(sizes, is_experts=None)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[name]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    if accelerator.is_main_process:
        model.save_pretrained(folder / "before")
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder / "after", state_dict=state)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 2, "fsdp": 1}])
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_models_have_the_files_that_they_came_from(
    run: Run, tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    pytest.importorskip("transformers")
    run(save_pretrained, name, sizes, tmp_path, timeout=180)
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("before", "after"))
    assert before.keys() == after.keys()
    assert any(".experts." in key for key in before)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, atol=0, rtol=0)


class Listed(nn.Module):
    """Experts in a list, which are not stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Single(nn.Module):
    """Parameters with one entry for each expert, with another interface."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def prepare_wrong_models() -> None:
    accelerator = make_accelerator({"ep_size": 2})

    def fails(model: nn.Module, message: str) -> None:
        before = dict(model.named_parameters())
        with pytest.raises(PreparationError, match=message):
            accelerator.prepare(model)
        assert all(model.get_parameter(name) is value for name, value in before.items())

    handler = accelerator.parallelism_config.ep_handler
    axis: Any = next(e for e in accelerator._runtime.strategy.layers if isinstance(e, ExpertAxis))
    with pytest.raises(ValueError, match="ep_size=2: layers.0.experts has 3 experts.*Use one of 1, 3"):
        accelerator.prepare(Net(3))
    with pytest.raises(ValueError, match="ep_size=2: is_experts selects no module of Linear"):
        accelerator.prepare(nn.Linear(2, 2))
    axis._is_experts = lambda module: isinstance(module, nn.ModuleList)
    fails(Listed(), "experts .ModuleList. takes .* Change its forward")
    axis._is_experts = lambda module: isinstance(module, Layer)
    fails(Net(), "layers.0 .Layer. is selected .* norm.weight .8,., .* Stack the weights")
    axis._is_experts = lambda module: isinstance(module, Single)
    fails(nn.Sequential(Single()), "The forward of 0 .Single. takes .x: .*, and that of a module of experts")
    model = Net()
    model.layers[0].experts.register_buffer("scale", torch.ones(4, 1))  # type: ignore[union-attr]
    axis._is_experts = are_experts
    fails(model, "layers.0.experts .Experts. has one entry for each expert in scale, and .* Make it a param")
    model = Net()
    name, weight = next(iter(model.layers[0].experts.named_parameters()))  # type: ignore[union-attr]
    model.layers[1].experts.register_parameter(name, weight)  # type: ignore[union-attr]
    fails(model, f"layers.0.experts.{name}, layers.1.experts.{name} are one parameter")
    axis._is_experts = None
    with pytest.raises(ValueError, match="ep_size=2: Net has no ep_plan with .* Pass ep_handler"):
        accelerator.prepare(Net())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert accelerator.unwrap_model(accelerator.prepare(frozen)) is frozen
    with pytest.raises(ValueError, match="ep_size=2: Net has no ep_plan with .* Pass ep_handler"):
        accelerator.plan_memory(Net(), torch.optim.SGD(nn.Linear(2, 2).parameters()), torch.ones(2, 8))
    assert handler.is_experts is are_experts


def prepare_model_alone() -> int:
    accelerator = make_accelerator({"ep_size": 2})
    model: Any = accelerator.prepare_model(Net())
    return sum(parameter.to_local().shape[0] for parameter in model.layers[0].experts.parameters())


def test_experts_of_a_model_that_is_prepared_alone_are_sharded(run: Run) -> None:
    own, other = run(prepare_model_alone)
    assert own == other == sum(p.shape[0] for p in Net().layers[0].experts.parameters()) // 2


def build_with_useless_options() -> str:
    accelerator = make_accelerator({"ep_size": 2}, kwargs_handlers=[DistributedDataParallelKwargs()])
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate.strategies.axes.expert").addHandler(handler)
    accelerator.prepare(Net())
    return "".join(messages)


def test_options_of_ddp_have_no_effect_on_experts(run: Run) -> None:
    first, _ = run(build_with_useless_options)
    assert first.startswith("[RANK 0] DistributedDataParallelKwargs have no effect with ep_size")


def build_wrong_accelerators() -> None:
    with pytest.raises(ValueError, match="ep_size=3 makes 3 processes, and there are 2"):
        make_accelerator({"ep_size": 3})


def test_wrong_sizes_and_models_raise_errors_before_anything_is_changed(run: Run) -> None:
    run(prepare_wrong_models)
    run(build_wrong_accelerators)
