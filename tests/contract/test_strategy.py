"""Every strategy gives the losses of one process on the joined batch, with accumulation and clipping."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    verification,
)
from accelerate.verification.options import WEIGHTS_FILE

STEPS, ACCUMULATION, BATCH = 10, 2, 2
VOCABULARY, WIDTH, HEAD, LENGTH = 29, 12, 6, 6  # sizes that two ranks do not share evenly everywhere
CLIP = 0.5
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = verification.Tolerances(loss=1e-5, norm=1e-5, update=1e-3, rounding=0.0)
Run = Callable[..., list[Any]]

UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
ONE = {"fsdp_version": 1, **UNITS}
TWO = {"fsdp_version": 2, **UNITS}
MESH = {"dp_replicate_size": 2, "dp_shard_size": 2}
LAYERS = {"dp_shard_size": 2, "tp_size": 2}

WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, int] | None, int]] = {
    "single": (None, None, 1),
    "ddp": (None, None, 2),
    "fsdp1 full": ({**ONE, "sharding_strategy": "FULL_SHARD"}, None, 2),
    "fsdp1 full, own parameters": ({**ONE, "use_orig_params": True}, None, 2),
    "fsdp1 grad": ({**ONE, "sharding_strategy": "SHARD_GRAD_OP"}, None, 2),
    "fsdp1 none": ({**ONE, "sharding_strategy": "NO_SHARD"}, None, 2),
    "fsdp1 hybrid": ({**ONE, "sharding_strategy": "HYBRID_SHARD"}, None, 2),
    "fsdp1 hybrid grad": ({**ONE, "sharding_strategy": "HYBRID_SHARD_ZERO2"}, None, 2),
    "fsdp2 reshard": ({**TWO, "reshard_after_forward": True}, None, 2),
    "fsdp2 keep": ({**TWO, "reshard_after_forward": False}, None, 2),
    "fsdp2 offload": ({**TWO, "cpu_offload": True}, None, 2),
    "fsdp2 recompute": ({**TWO, "activation_checkpointing": True}, None, 2),
    "fsdp1 recompute": ({**ONE, "activation_checkpointing": True}, None, 2),
    "fsdp2 one unit": ({"fsdp_version": 2}, None, 2),
    "fsdp1 one unit": ({"fsdp_version": 1}, None, 2),
    "fsdp1 hybrid 2x2": ({**ONE, "sharding_strategy": "HYBRID_SHARD"}, MESH, 4),
    "fsdp1 hybrid grad 2x2": ({**ONE, "sharding_strategy": "HYBRID_SHARD_ZERO2"}, MESH, 4),
    "fsdp2 2x2": (TWO, MESH, 4),
    "tp": (None, {"tp_size": 2}, 2),
    "tp, two copies": (None, {"dp_replicate_size": 2, "tp_size": 2}, 4),
    "fsdp2 + tp": (TWO, LAYERS, 4),
    "fsdp2 + tp, recompute": ({**TWO, "activation_checkpointing": True}, LAYERS, 4),
    "fsdp2 + tp, loaded on rank 0": ({**TWO, "cpu_ram_efficient_loading": True}, LAYERS, 4),
}
"""Name -> fields of the plugin, sizes of the mesh, number of processes."""

CORE = ("single", "ddp", "fsdp1 full", "fsdp2 reshard", "fsdp2 offload", "tp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # its bias would get no gradient
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [
            each(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(torch.nn.functional.gelu(self.widen(x)))


class Transformer(nn.Module):
    """A language model whose head is its embedding."""

    tp_plan = {
        **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "widen")},
        **{f"blocks.*.{name}": "rowwise" for name in ("out", "narrow")},
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
}
"""What the launcher sets for the worker."""

SIZES = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


def texts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randint(VOCABULARY, (count, LENGTH), generator=generator))


def train(
    plugin: dict[str, Any] | None,
    mesh: dict[str, int] | None,
    folder: str | None = None,
    leave_after: int = STEPS,
    cpu: bool = False,
) -> dict[str, Any]:
    """Ten updates on batches of which this process sees its share.

    With a folder it resumes from the checkpoint there, if there is one, and saves one when it leaves early.
    """
    warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
    accelerator = Accelerator(
        cpu=cpu,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        fsdp_plugin=None if plugin is None else FullyShardedDataParallelPlugin(**plugin),
        parallelism_config=None if mesh is None else ParallelismConfig(**mesh),
    )
    torch.manual_seed(1)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(texts(STEPS * ACCUMULATION * BATCH * 4), batch_size=BATCH * 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    before = whole_weights(accelerator, model)
    if folder is not None and leave_after == STEPS:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, STEPS // 2 * ACCUMULATION)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
        if leave_after < STEPS and len(norms) == leave_after and folder is not None:
            accelerator.save_state(folder)
            break
    kind = DistributedType(accelerator.distributed_type).value
    return {
        "type": kind,
        "losses": losses,
        "norms": norms,
        "before": before,
        "after": whole_weights(accelerator, model),
    }


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of the whole weights, in tensors that share no memory."""
    state = accelerator.get_state_dict(model)
    return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    result = train(None, None, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return result


def record(folder: Path, results: list[dict[str, Any]]) -> verification.Run:
    """Returns the results of all ranks as `accelerate verify` records them."""
    folder.mkdir()
    for moment in ("before", "after"):
        save_file(results[0][moment], folder / WEIGHTS_FILE.format(moment, 0))
    steps = {}
    for number in range(STEPS):
        losses = [
            statistics.fmean(result["losses"][number * ACCUMULATION :][:ACCUMULATION]) for result in results
        ]
        assert max(losses) - min(losses) <= EXACT.loss * max(losses)
        norms = [result["norms"][number] for result in results]
        steps[0, number + 1] = verification.Step(losses[0], norms, [], [], [], {}, True, [], {})
    return verification.Run(folder, len(results), label=results[0]["type"], steps=steps)


@pytest.mark.parametrize(
    "way", [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_losses_and_weights_are_those_of_one_process(
    run: Run, tmp_path: Path, reference: dict[str, Any], way: str
) -> None:
    plugin, mesh, processes = WAYS[way]
    results = run(train, plugin, mesh, processes=processes)
    assert len(reference["losses"]) == STEPS * ACCUMULATION
    assert max(reference["norms"]) > CLIP  # the bound bites
    for result in results:
        assert list(result["after"]) in ([], list(reference["after"]))  # FSDP 1 returns it on rank 0
    own, expected = record(tmp_path / "own", results), record(tmp_path / "reference", [reference])
    findings = verification.compare(own, expected, EXACT)
    assert not findings, verification.format_runs(own, expected, findings, STEPS)


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({"FSDP_VERSION": "2"}, 2),
        pytest.param({"FSDP_VERSION": "1"}, 2, marks=pytest.mark.slow),
        pytest.param({"FSDP_VERSION": "2", **SIZES}, 4, marks=pytest.mark.slow),
        pytest.param({"FSDP_VERSION": "1", **SIZES}, 4, marks=pytest.mark.slow),
    ],
)
def test_variables_of_the_launcher_choose_the_strategy(
    run: Run, reference: dict[str, Any], variables: dict[str, str], processes: int
) -> None:
    results = run(train, None, None, processes=processes, env={**VARIABLES, **variables})
    for result in results:
        assert result["type"] == "FSDP"
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(reference["losses"]), **TOLERANCE
        )


SHARDS = {"state_dict_type": "SHARDED_STATE_DICT"}
SAVES: dict[str, tuple[dict[str, Any] | None, dict[str, int] | None, int]] = {
    "fsdp1 shards": ({**ONE, **SHARDS}, None, 2),
    "fsdp1 shards, own parameters": ({**ONE, **SHARDS, "use_orig_params": True}, None, 2),
    "fsdp1 shards grad": ({**ONE, **SHARDS, "sharding_strategy": "SHARD_GRAD_OP"}, None, 2),
    "fsdp1 shards none": ({**ONE, **SHARDS, "sharding_strategy": "NO_SHARD"}, None, 2),
    "fsdp1 shards one unit": ({"fsdp_version": 1, **SHARDS}, None, 2),
    "fsdp1 local": ({**ONE, "state_dict_type": "LOCAL_STATE_DICT"}, None, 2),
    "fsdp1 shards hybrid 2x2": ({**ONE, **SHARDS, "sharding_strategy": "HYBRID_SHARD"}, MESH, 4),
    "fsdp2 whole": ({**TWO, "state_dict_type": "FULL_STATE_DICT"}, None, 2),
}
"""Further ways to save: FSDP 1 saves full state dicts by default, FSDP 2 shards."""

MOVES = [
    ("fsdp2 reshard", "ddp"),
    *(
        pytest.param(before, after, marks=pytest.mark.slow)
        for before, after in [
            ("fsdp1 shards", "fsdp1 shards, own parameters"),
            ("ddp", "fsdp1 full"),
            ("ddp", "fsdp2 offload"),
            ("fsdp2 2x2", "fsdp2 keep"),
            ("fsdp2 recompute", "single"),
            ("single", "fsdp2 2x2"),
            ("fsdp2 keep", "fsdp2 one unit"),
            ("tp", "fsdp2 + tp"),
            ("fsdp1 full", "fsdp2 reshard"),
            ("fsdp2 keep", "fsdp1 grad"),
            ("fsdp1 none", "fsdp1 full, own parameters"),
            ("fsdp1 hybrid 2x2", "single"),
            ("fsdp2 + tp", "ddp"),
            ("tp, two copies", "fsdp2 reshard"),
            ("fsdp2 + tp", "tp, two copies"),
            ("fsdp2 + tp", "tp"),
            ("fsdp2 2x2", "fsdp2 + tp"),
            ("fsdp2 offload", "fsdp1 shards, own parameters"),
            ("fsdp2 whole", "fsdp1 hybrid 2x2"),
            ("fsdp1 shards, own parameters", "single"),
            ("fsdp1 shards, own parameters", "fsdp1 shards hybrid 2x2"),
            ("fsdp1 shards grad", "fsdp2 2x2"),
            ("fsdp1 shards none", "ddp"),
            ("fsdp1 shards one unit", "fsdp1 shards none"),
            ("fsdp1 local", "fsdp1 shards one unit"),
            ("fsdp1 shards hybrid 2x2", "fsdp2 keep"),
        ]
    ),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_checkpoint_resumes_under_another_strategy(
    run: Run, reference: dict[str, Any], tmp_path: Path, before: str, after: str
) -> None:
    """Save in one layout, load in another, resume: the losses of a run without a break."""
    losses: list[float] = []
    for way, leave_after in ((before, STEPS // 2), (after, STEPS)):
        plugin, mesh, processes = {**WAYS, **SAVES}[way]
        arguments = (plugin, mesh, str(tmp_path / "state"), leave_after)
        results = run(train, *arguments, processes=processes)
        losses += results[0]["losses"]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference["losses"]), **TOLERANCE)


def evaluate(plugin: dict[str, Any] | None, mesh: dict[str, int] | None) -> list[int]:
    """Gather a whole dataset of 11 texts; ranks that share layers share batches."""
    accelerator = Accelerator(
        fsdp_plugin=None if plugin is None else FullyShardedDataParallelPlugin(**plugin),
        parallelism_config=None if mesh is None else ParallelismConfig(**mesh),
    )
    data = texts(11)
    model, loader = accelerator.prepare(Transformer(), DataLoader(list(zip(range(11), data, strict=True)), 2))
    model.eval()
    seen: list[int] = []
    for index, batch in loader:
        with torch.no_grad():
            model(batch)
        seen += accelerator.gather_for_metrics(index).tolist()
    return seen


@pytest.mark.parametrize(
    "way",
    [
        "fsdp2 reshard",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("tp", "tp, two copies", "fsdp2 + tp", "fsdp2 2x2")
        ),
    ],
)
def test_metrics_see_each_sample_once(run: Run, way: str) -> None:
    plugin, mesh, processes = WAYS[way]
    for seen in run(evaluate, plugin, mesh, processes=processes):
        assert sorted(seen) == list(range(11))
