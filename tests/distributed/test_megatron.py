"""Megatron-LM trains: the real `megatron.core` (package megatron-core), on the CPU.

`megatron.training` is the real one where the package has it (0.17 and newer), otherwise the stand-in of
tests/stand_ins.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytest.importorskip("megatron.core")  # package megatron-core: make test-slow with it installed

pytestmark = pytest.mark.slow

STAND_INS = Path(__file__).parents[1] / "stand_ins" / "megatron_lm"
LENGTH, VOCABULARY, ROWS = 12, 64, 8

Run = Callable[..., list[Any]]


def use_stand_ins() -> None:
    warnings.simplefilter("ignore")  # megatron.core warns of what it lacks
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as the launcher does
    sys.path.insert(0, str(STAND_INS))
    import cuda_on_cpu

    sys.path.remove(str(STAND_INS))  # it has a `megatron.training`, and there may be a real one
    cuda_on_cpu.install()
    import megatron

    if find_spec("megatron.training") is None:
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
    accelerator = Accelerator(megatron_lm_plugin=plugin, mixed_precision=precision)
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


def save_and_resume(folder: str) -> tuple[list[float], list[float], Any]:
    """Train, save, train on; load, and train on again."""
    use_stand_ins()
    accelerator, model, optimizer, scheduler, loader = start(GPT, batch=2, tp_degree=2, **MICRO)
    model.train()
    batches = list(loader)[:6]

    def steps(data: list[Any]) -> list[float]:
        losses = []
        for batch in data:
            losses.append(float(model(**batch).loss))
            optimizer.step()
        return losses

    steps(batches[:3])
    accelerator.save_state(folder)
    first = steps(batches[3:])
    accelerator.load_state(folder)
    assert (model.iteration, optimizer.num_updates) == (3, 3)
    return first, steps(batches[3:]), scheduler.scheduler.num_steps


def test_a_resumed_run_matches_an_uninterrupted_one(run: Run, tmp_path: Path) -> None:
    for first, second, samples_read in run(save_and_resume, str(tmp_path / "state"), timeout=200):
        assert first == second
        assert samples_read == 6 * 4
    written = sorted(path.name for path in (tmp_path / "state" / "megatron" / "iter_0000003").iterdir())
    stand_in = ["rank_00.pt", "rank_01.pt"]
    assert written == stand_in or {".metadata", "metadata.json"} < set(written)


def learn(precision: str, fields: dict[str, Any]) -> tuple[list[float], Any, Any]:
    """See one batch again and again; return losses, and two ways to the loss of an evaluation."""
    use_stand_ins()
    accelerator, model, optimizer, _, loader = start(
        GPT, batch=4, masked=True, return_logits=True, precision=precision, **fields
    )
    model.train()
    batch = next(iter(loader))
    losses = [float(model(**batch).loss) for _ in range(20)]
    model.eval()
    output = model(**batch)
    logits = output.logits[..., :VOCABULARY].float()[:, :-1]
    known = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100)
    return losses, float(output.loss), float(known)


@pytest.mark.parametrize(
    ("precision", "fields"), [("no", {"pp_degree": 2}), ("no", {"tp_degree": 2}), ("bf16", {"tp_degree": 2})]
)
def test_the_loss_decreases_and_all_ranks_have_logits(
    run: Run, precision: str, fields: dict[str, Any]
) -> None:
    for losses, loss, known in run(learn, precision, fields, timeout=200):
        assert losses[-1] < losses[0] / 2
        assert loss == pytest.approx(known, rel=1e-5 if precision == "no" else 1e-2)


def rates_of_groups() -> set[tuple[float, float, bool]]:
    use_stand_ins()
    _, model, optimizer, *_ = start(
        GPT,
        batch=2,
        no_wd_decay_cond=lambda name, parameter: parameter.ndim == 1,
        scale_lr_cond=lambda name, parameter: "word_embeddings" in name,
        lr_mult=0.5,
    )
    model.train()
    for _ in range(2):
        model(input_ids=torch.arange(1, 2 * LENGTH + 1).reshape(2, LENGTH))
    return {
        (round(group["lr"], 6), group["weight_decay"], any(p.ndim == 1 for p in group["params"]))
        for group in optimizer.param_groups
    }


def test_conditions_for_decay_and_rates(run: Run) -> None:
    (groups,) = run(rates_of_groups, processes=1, timeout=120)
    assert groups == {(0.01, 0.1, False), (0.005, 0.1, False), (0.01, 0.0, True)}


def draw(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    return {"input_ids": torch.where(torch.rand(tokens.shape) < 0.5, tokens, 1)}


def share_random_batches() -> tuple[float, list[float]]:
    from accelerate.strategies.megatron import gather_across_data_parallel_groups

    use_stand_ins()
    accelerator, model, *_ = start(GPT, batch=2, tp_degree=2)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(samples(), batch_size=2, collate_fn=draw))  # type: ignore[arg-type]
    model.eval()
    loss = model(**next(iter(loader))).loss
    return float(loss), gather_across_data_parallel_groups(loss).tolist()


def test_ranks_that_share_layers_see_one_batch(run: Run) -> None:
    results = run(share_random_batches, timeout=200)
    assert results[0] == results[1]
    assert results[0][1] == [results[0][0]]


def gather_each_sample() -> int:
    use_stand_ins()
    accelerator, model, _, _, loader = start(GPT, batch=5, **MICRO, tp_degree=2)
    model.eval()
    gathered = []
    for batch in loader:
        model(**batch)
        gathered.append(accelerator.gather_for_metrics(batch["input_ids"]))
    expected = torch.stack([sample["input_ids"] for sample in samples()])
    assert torch.cat(gathered).equal(expected)
    return len(gathered)


def test_metrics_see_each_sample_once(run: Run) -> None:
    assert run(gather_each_sample, timeout=200) == [7, 7]


def read_made_up_texts(degrees: dict[str, int]) -> tuple[list[int], list[float], int]:
    """Train on what `megatron.core` makes up."""
    from accelerate import Accelerator
    from accelerate.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin

    use_stand_ins()
    made_up = {
        "mock_data": True,
        "num_workers": 0,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY - 1,
    }
    plugin = MegatronLMPlugin(num_micro_batches=2, other_megatron_args=made_up, **degrees)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    model = Model(**GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=8)
    data = MegatronLMDummyDataLoader(splits_string="1,1,1", seq_length=LENGTH, micro_batch_size=2)
    model, optimizer, scheduler, train, valid, _ = accelerator.prepare(
        model, optimizer, scheduler, data, data, data
    )
    model.train()
    losses, sizes = [], []
    for _ in range(3):
        batch = next(train)
        sizes.append(sum(map(len, batch.values())))
        losses.append(float(model(**batch).loss))
    model.eval()
    losses.append(float(model(**next(valid)).loss))
    return sizes, losses, model.get_batch_data_iterator(next(valid))[1]


@pytest.mark.parametrize("degrees", [{"tp_degree": 2}, {"pp_degree": 2}])
def test_megatrons_own_data(run: Run, degrees: dict[str, int]) -> None:
    (read, losses, number), (other_read, other_losses, _) = run(read_made_up_texts, degrees, timeout=200)
    assert losses == other_losses
    assert number == 2
    assert all(read)
    assert any(other_read) is ("pp_degree" in degrees)  # of those that share layers, one reads
