"""Megatron-LM trains: the real `megatron.core` (package megatron-core), on the CPU.

`megatron.training`, which is in no package, is the stand-in of tests/stand_ins.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("megatron.core")  # package megatron-core: make test-slow with it installed

pytestmark = pytest.mark.slow

STAND_INS = Path(__file__).parents[1] / "stand_ins" / "megatron_lm"
LENGTH, VOCABULARY, ROWS = 12, 64, 8

Run = Callable[..., list[Any]]


def use_stand_ins() -> None:
    warnings.simplefilter("ignore")  # megatron.core warns of what it lacks
    sys.path.insert(0, str(STAND_INS))
    import cuda_on_cpu

    cuda_on_cpu.install()
    import megatron

    megatron.__path__ = [*megatron.__path__, str(STAND_INS / "megatron")]


class Model(nn.Module):
    """What a user passes: only its configuration counts."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(**config)


GPT = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": VOCABULARY,
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **LLAMA,
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": VOCABULARY,
}
T5 = {
    "model_type": "t5",
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
}


def samples(number: int = 64, masked: bool = False) -> list[dict[str, torch.Tensor]]:
    found = []
    for index in range(number):
        tokens = (3 * index + torch.arange(LENGTH)) % (VOCABULARY - 1) + 1  # each follows from the last one
        labels = tokens.clone()
        if masked:
            labels[: index % (LENGTH - 2)] = -100
        found.append({"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)})
    return found


def start(
    config: dict[str, Any], batch: int = 2, name: str = "Model", masked: bool = False, **fields: Any
) -> tuple[Any, Any, Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin

    fields.setdefault("seq_length", LENGTH)
    fields.setdefault("other_megatron_args", {"make_vocab_size_divisible_by": VOCABULARY // 2})
    precision = fields.pop("precision", "no")
    plugin = MegatronLMPlugin(**fields)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, mixed_precision=precision)
    model = type(name, (Model,), {})(**config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    copies = accelerator.num_processes // (plugin.tp_degree * plugin.pp_degree * plugin.context_parallel_size)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=100 * copies, warmup_num_steps=2 * copies)
    loader = DataLoader(samples(masked=masked), batch_size=batch)  # type: ignore[arg-type]
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    return accelerator, *prepared


def train(
    config: dict[str, Any],
    steps: int = 6,
    batch: int = 2,
    name: str = "Model",
    masked: bool = False,
    **fields: Any,
) -> tuple[list[float], list[float], int]:
    """Train as any script does; return losses, learning rates and rows of a batch."""
    use_stand_ins()
    accelerator, model, optimizer, scheduler, loader = start(config, batch, name, masked, **fields)
    fill_by_name(model)
    model.train()
    losses, rates, rows = [], [], 0
    batches = iter(loader)
    for _ in range(steps):
        data = next(batches)
        rows = len(data["input_ids"])
        with accelerator.accumulate(model):
            loss = model(**data).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss))
        rates.append(scheduler.get_last_lr()[0])
    return losses, rates, rows


def fill_by_name(model: Any) -> None:
    """Give parameters values that follow from their names alone, however layers are spread over stages."""
    from megatron.core import parallel_state as groups

    rank, size = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    for part in model.module:
        numbers = {
            prefix: module.layer_number
            for prefix, module in part.named_modules()
            if hasattr(module, "layer_number")
        }
        for name, parameter in part.named_parameters():
            layer = next((number for prefix, number in numbers.items() if name.startswith(prefix + ".")), 0)
            kind = name.split(".layers.")[-1].partition(".")[2] if ".layers." in name else name
            if kind.endswith(("output_layer.weight", "word_embeddings.weight")):
                kind = "tied"  # first and last stage have the same one
            kind = kind.split("module.")[-1]
            whole = list(parameter.shape)
            if parameter.tensor_model_parallel:
                whole[parameter.partition_dim] *= size
            generator = torch.Generator().manual_seed(sum(map(ord, f"{layer} {kind}")) * 7919 + layer)
            values = torch.randn(whole, generator=generator) * 0.05 + float(
                "norm" in name and "weight" in name
            )
            if parameter.tensor_model_parallel:
                # Both halves of a gated layer are spread on their own.
                halves = values.chunk(2) if "linear_fc1" in name and model.args.swiglu else [values]
                values = torch.cat([half.chunk(size, parameter.partition_dim)[rank] for half in halves])
            with torch.no_grad():
                parameter.copy_(values)
    model.optimizer.reload_model_params()


FAMILIES = {
    "gpt": (GPT, "GPT2LMHeadModel"),
    "llama": (LLAMA, "LlamaForCausalLM"),
    "experts": (EXPERTS, "Glm4MoeForCausalLM"),
    "bert": (BERT, "BertForMaskedLM"),
    "t5": (T5, "T5ForConditionalGeneration"),
}

KNOWN: dict[str, list[float]] = {}
"""Losses of one process, by what it trained."""


def losses_alone(run: Run, family: str) -> list[float]:
    if family not in KNOWN:
        config, name = FAMILIES[family]
        ((losses, rates, rows),) = run(train, config, 6, 4, name, True, processes=1, timeout=120)
        assert rows == 4
        assert rates[0] < rates[1]  # it warms up
        KNOWN[family] = losses
    return KNOWN[family]


PLAIN: dict[str, Any] = {}
MICRO = {"num_micro_batches": 2}


@pytest.mark.parametrize(
    ("family", "processes", "batch", "fields"),
    [
        ("gpt", 1, 2, MICRO),
        ("gpt", 2, 2, PLAIN),
        ("gpt", 2, 2, {"use_distributed_optimizer": True}),
        ("gpt", 2, 4, {"tp_degree": 2}),
        ("gpt", 2, 2, {"pp_degree": 2, **MICRO}),
        ("gpt", 2, 2, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, **MICRO}),
        ("gpt", 2, 2, {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1, **MICRO}),
        ("gpt", 4, 2, {"tp_degree": 2, "pp_degree": 2, **MICRO}),
        (
            "gpt",
            1,
            4,
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ("gpt", 1, 4, {"return_logits": True}),
        ("llama", 2, 4, {"tp_degree": 2}),
        ("llama", 2, 2, {"pp_degree": 2, **MICRO}),
        ("experts", 2, 2, PLAIN),
        ("bert", 2, 4, {"tp_degree": 2}),
        ("bert", 2, 2, {"pp_degree": 2, **MICRO}),
        ("t5", 2, 4, {"tp_degree": 2}),
        ("t5", 2, 2, PLAIN),
    ],
)
def test_losses_are_those_of_one_process(
    run: Run, family: str, processes: int, batch: int, fields: dict[str, Any]
) -> None:
    config, name = FAMILIES[family]
    results = run(train_with, config, 6, batch, name, True, fields, processes=processes, timeout=200)
    for losses, _, _ in results:
        assert losses == pytest.approx(losses_alone(run, family), rel=1e-4)


def train_with(*args: Any) -> Any:
    *positional, fields = args
    return train(*positional, **fields)
