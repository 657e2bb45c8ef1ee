"""Ranks that exchange heads for sequences train as one process does with whole sequences."""

from __future__ import annotations

import copy
import pickle
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from accelerate import Accelerator, torch_private
from accelerate.base import ConfigurationError, PreparationError, is_torch_version
from accelerate.losses import use_lm_loss
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import TorchContextParallelConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    sequence_parallel_attention,
    set_seed,
)

Run = Callable[..., list[Any]]
has_ring_on_cpu = pytest.mark.skipif(
    is_torch_version("<", "2.13"), reason="context parallelism on the CPU is refused before torch 2.13"
)
TOKENS, LENGTH, ROWS, STEPS = 101, 24, 2, 2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": TOKENS,
    "max_position_embeddings": 128,
}


class Reader(nn.Module):
    """Attends to the tokens before, and predicts labels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, 64), nn.Embedding(64, 64)
        self.heads, self.mix, self.out = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, TOKENS)

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(-1, (8, 8)).transpose(1, 2) for each in self.heads(hidden).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.mix(attended.transpose(1, 2).flatten(2))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        return hidden + self.attend(hidden)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Any:
        guesses = self.out(self.hidden(tokens, positions))
        if labels is None:
            return guesses
        return self.loss(guesses.flatten(0, 1), labels.flatten()), guesses

    def loss(self, guesses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(guesses, labels, ignore_index=-1)


class CountingPositions(Reader):
    """Counts positions itself, also when activations are computed again."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._counted, tokens, use_reentrant=False)

    def _counted(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().hidden(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))


class Wrapping(Reader):
    """Calls a model of transformers, which counts positions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _llama(2).model
        del self.tokens, self.positions, self.heads, self.mix

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids=tokens).last_hidden_state

    def loss(self, guesses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(guesses.log_softmax(-1), labels, ignore_index=-1)


def _llama(heads: int, **options: Any) -> Any:
    import transformers

    sizes = {**SIZES, "num_key_value_heads": heads, "attn_implementation": "sdpa", **options}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _scaled(kind: str, **options: Any) -> nn.Module:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **options}
    return _llama(2, max_position_embeddings=16, rope_parameters=rope, initializer_range=0.2)


def _of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        sizes = {**SIZES, "attn_implementation": "sdpa", **options}
        return getattr(transformers, model)(getattr(transformers, config)(**sizes))

    return build


NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: _llama(8),
    "grouped": lambda: _llama(2),
    "one key and value": lambda: _llama(1),
    "eager": lambda: _llama(2, attn_implementation="eager"),
    "packed": lambda: _llama(2, use_cache=False),
    "packed with a cache": lambda: _llama(2),
    "padded before tokens": lambda: _llama(2),
    "prefix": lambda: _llama(2),
    "uneven": lambda: _llama(4),
    "sliding": _of("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=5),
    "some sliding": _of(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "gemma": _of("GemmaForCausalLM", "GemmaConfig", num_key_value_heads=1, head_dim=16),
    "gpt2": _of("GPT2LMHeadModel", "GPT2Config", **OF_GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "bidirectional": _of("BertForMaskedLM", "BertConfig", **NO_DROPOUT),
    "padded after tokens": _of("BertForMaskedLM", "BertConfig", **NO_DROPOUT),
    "alibi": _of("FalconForCausalLM", "FalconConfig", alibi=True),
    "rotary, scaled by the length": lambda: _scaled("dynamic"),
    "rotary, for long sequences": lambda: _scaled(
        "longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, original_max_position_embeddings=16
    ),
    "own": Reader,
    "own uneven": Reader,
    "own uneven counting": CountingPositions,
    "own uneven wrapping": Wrapping,
}


def batch_of(kind: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    length = LENGTH + 1 if "uneven" in kind else LENGTH
    tokens = torch.randint(1, TOKENS, (ROWS, length), generator=generator)
    labels = tokens.clone()
    labels[0, :9] = -100
    if "own" in kind:
        positions = torch.arange(length).expand(ROWS, -1).contiguous()
        return {"tokens": tokens, "positions": positions, "labels": labels.clamp(min=-1)}
    batch = {"input_ids": tokens, "labels": labels}
    if kind.startswith("packed"):
        parts = [torch.arange(size) for size in (7, 9, 8)]
        batch["position_ids"] = torch.cat(parts).expand(ROWS, -1).contiguous()
    if kind.startswith("padded"):
        batch["attention_mask"] = torch.ones_like(tokens)
        padding = slice(0, 5) if "before" in kind else slice(19, None)
        batch["attention_mask"][0, padding] = 0
        labels[0, padding] = -100
    if kind == "prefix":
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[:, :6] = True
        batch["attention_mask"] = mask.expand(ROWS, 1, -1, -1).contiguous()
    return batch


def loss_of(outputs: Any) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs.loss


def loss_of_logits(outputs: Any, labels: torch.Tensor, shifts: bool, ignored: int) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)


def loss_in_block(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loop of context parallelism, with labels that the loop shifts."""
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    is_own, labels = "tokens" in batch, batch.pop("labels")
    if not is_own:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    buffers = [*batch.values(), labels]
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        logits = model(**batch)
        logits = logits if is_own else logits.logits
        assert logits.shape[1] == labels.shape[1] < LENGTH
        ignored = -1 if is_own else -100
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)
        accelerator.backward(loss)
    return loss


class Result:
    """Losses and norms of the steps, logits of an evaluation, and weights."""

    def __init__(self, scalars: list[float], logits: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
        self.scalars, self.logits, self.weights = scalars, logits, weights

    def difference(self, other: Result) -> float:
        scalars = (abs(mine - theirs) for mine, theirs in zip(self.scalars, other.scalars, strict=True))
        weights = (float((self.weights[name] - other.weights[name]).abs().max()) for name in self.weights)
        return max(*scalars, *weights, float((self.logits - other.logits).abs().max()))


def train(kind: str, way: str = "", accelerator: Accelerator | None = None) -> Result:
    """Trains a model, on whole batches of the joined replicas without an accelerator."""
    set_seed(0)
    model: Any = MODELS[kind]()
    if "without logits" in way:
        use_lm_loss(model)
    if "recomputed" in way and accelerator is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers has another name for it
            model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in way})
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    parts = 2 if "accumulated" in way else 1
    scalars = []
    model.train()
    for step in range(STEPS):
        total = 0.0
        for part in range(parts):
            batch = batch_of(kind, 10 * step + part)
            if accelerator is None:
                with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in way):
                    loss = loss_of(model(**batch)) / parts
                loss.backward()
                total += loss.item()
                continue
            with accelerator.accumulate(model):
                total += _step(accelerator, model, batch, kind, way) / parts
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if accelerator is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scalars += [total, float(norm)]
    model.eval()
    with torch.no_grad():
        outputs = model(**batch_of(kind, 99))
    logits = outputs[1] if isinstance(outputs, tuple) else outputs.logits
    weights = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    copies = {name: weight.detach().float().clone() for name, weight in weights.items()}
    return Result([*scalars, loss_of(outputs).item()], logits.float(), copies)


def _step(accelerator: Accelerator, model: Any, batch: dict[str, torch.Tensor], kind: str, way: str) -> float:
    if "in a block" in way:
        loss = loss_in_block(accelerator, model, batch)
    else:
        if "from logits" in way:
            labels = batch.pop("labels")
            shifts = "own" not in kind and kind not in ("bidirectional", "padded after tokens")
            loss = loss_of_logits(model(**batch), labels, shifts, ignored=-1 if "own" in kind else -100)
        else:
            loss = loss_of(model(**batch))
        accelerator.backward(loss)
    return loss.item()  # is that of whole sequences on each rank


def compare(kinds: list[str], ways: list[str], sizes: dict[str, Any]) -> dict[str, float]:
    """Returns the largest differences of each model from one process."""
    torch.manual_seed(0)
    found = {}
    for kind in kinds:
        references: dict[str, Result] = {}
        for way in ways:
            reference = " ".join(word for word in ("bf16", "accumulated") if word in way)
            if reference not in references:
                references[reference] = train(kind, reference)
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "sharded" in way else None
            are_apart = kind != "packed with a cache"  # with which documents attend to each other
            accelerator = Accelerator(
                dataloader_config=DataLoaderConfiguration(check_packing=are_apart),
                gradient_accumulation_steps=2 if "accumulated" in way else 1,
                mixed_precision="bf16" if "bf16" in way else None,
                fsdp_plugin=plugin,
                parallelism_config=ParallelismConfig(**sizes, sp_backend="torch"),
            )
            trained = train(kind, way, accelerator)
            if trained.weights:  # those of FSDP are gathered on rank 0
                found[f"{kind}: {way}"] = trained.difference(references[reference])
    return found


def check(ranks: list[dict[str, float]], limit: float = 1e-5) -> None:
    assert ranks[0]
    for found in ranks:
        assert {name: value for name, value in found.items() if not value < limit} == {}


WITH_WHOLE_MASKS = ("prefix", "bidirectional", "padded after tokens", "alibi")
FAST = [
    *("grouped", "packed", "sliding", "uneven", "own uneven", "own uneven counting"),
    *("own uneven wrapping", "rotary, scaled by the length"),
]
CORE = ["dense", "grouped", "one key and value", "sliding", "packed", "prefix"]
WAYS = ["", "sharded", "recomputed", "reentrant recomputed", "accumulated", "from logits", "without logits"]
RING = {"cp_size": 2, "sp_size": 2}


def test_two_ranks_train_as_one(run: Run) -> None:
    check(run(compare, FAST, ["", "in a block"], {"sp_size": 2}))
    check(
        run(compare, ["grouped", "uneven"], ["without logits", "without logits, accumulated"], {"sp_size": 2})
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MODELS))
def test_models_train_as_on_one_rank(run: Run, kind: str) -> None:
    ways = ["", "from logits", "sharded", *([] if kind in WITH_WHOLE_MASKS else ["in a block"])]
    check(run(compare, [kind], ways, {"sp_size": 2}, timeout=300))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ways_to_train_equal_one_rank(run: Run, ranks: int) -> None:
    check(run(compare, CORE, WAYS, {"sp_size": ranks}, processes=ranks, timeout=600))


@pytest.mark.slow
def test_training_in_16_bits_is_close_to_that_of_one_rank(run: Run) -> None:
    check(run(compare, CORE, ["bf16"], {"sp_size": 2}, timeout=300), limit=0.05)


# With context parallelism


def compare_rings() -> tuple[dict[str, float], dict[str, int]]:
    """Returns the differences of models from one process, and how often they compute ring attention."""
    kinds, counts = ["grouped", "packed", "own uneven counting"], {}
    found = compare(kinds, [""], RING)
    for kind in kinds:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(parallelism_config=ParallelismConfig(**RING, sp_backend="torch"))
        model = accelerator.prepare(MODELS[kind]())
        for number in range(2):
            loss_of(model(**batch_of(kind, number)))  # which compares the model with one rank
        counting = Counting(torch_private.ring_attention)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_private, "ring_attention", counting)
            loss_of(model(**batch_of(kind, 2)))
        counts[kind] = counting.calls
    return found, counts


@has_ring_on_cpu
def test_four_ranks_of_two_axes_train_as_one(run: Run) -> None:
    ranks = run(compare_rings, processes=4, timeout=120)
    check([found for found, _ in ranks])
    for _, counts in ranks:  # layers of causal attention without a mask
        assert counts == {"grouped": 2, "packed": 0, "own uneven counting": 1}


@has_ring_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MODELS))
def test_models_train_on_two_axes_as_on_one_rank(run: Run, kind: str) -> None:
    ways = ["", "from logits", "sharded", *([] if kind in WITH_WHOLE_MASKS else ["in a block"])]
    check(run(compare, [kind], ways, RING, processes=4, timeout=600))


@has_ring_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "uneven", "packed"])
def test_ways_to_train_on_two_axes_equal_one_rank(run: Run, kind: str) -> None:
    check(run(compare, [kind], WAYS, RING, processes=4, timeout=600))
    check(run(compare, [kind], ["bf16"], RING, processes=4, timeout=600), limit=0.05)


@has_ring_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ({"dp_replicate_size": 2, **RING}, ""),
        ({"dp_shard_size": 2, **RING}, "sharded"),
        ({"cp_size": 3, "sp_size": 2}, "in a block"),
        ({"cp_size": 2, "sp_size": 2, "tp_size": 2}, ""),
    ],
)
def test_more_axes_train_as_one_rank(run: Run, sizes: dict[str, int], way: str) -> None:
    handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    options = {**sizes, "cp_handler": handler}
    check(run(compare, ["grouped", "uneven"], [way], options, processes=prod(sizes.values()), timeout=600))


@has_ring_on_cpu
@pytest.mark.slow
def test_an_evaluation_on_two_axes_has_whole_outputs(run: Run) -> None:
    for same in run(evaluate, RING, processes=4, timeout=120):
        assert all(same), same


@has_ring_on_cpu
@pytest.mark.slow
def test_what_cannot_be_exact_on_two_axes_is_refused_on_all_ranks(run: Run) -> None:
    for said in run(make_mistakes, RING, processes=4, timeout=300):
        for name, (_, reason) in {**MISTAKES, "own function": (None, "Set cp_size=1")}.items():
            assert re.search(reason, said[name]), (name, said[name])


# Collectives


class Counting:
    """Counts the calls of a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.calls, self._call = 0, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._call(*args, **kwargs)


def count_exchanges() -> list[int]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    model = accelerator.prepare(_llama(2))
    for number in range(2):
        loss_of(model(**batch_of("grouped", number)))  # which compares the model with one rank
    counting = Counting(dist.all_to_all_single)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        loss = loss_of(model(**batch_of("grouped", 2)))
        in_forward, counting.calls = counting.calls, 0
        accelerator.backward(loss)
    return [in_forward, counting.calls]


def test_a_layer_communicates_twice_in_each_pass(run: Run) -> None:
    assert run(count_exchanges) == [[4, 4], [4, 4]]  # two layers: queries with keys and values, and outputs


# Evaluation


def evaluate(sizes: dict[str, int]) -> list[bool]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes, sp_backend="torch"))
    set_seed(0)
    model = _llama(2)
    batches = [batch_of("grouped", number) for number in range(3)]
    rows = [{name: tensor[row] for name, tensor in batch.items()} for batch in batches for row in range(ROWS)]
    with torch.no_grad():
        expected = [model(**batch) for batch in batches]
        texts = model.generate(batches[0]["input_ids"], max_new_tokens=4, do_sample=False)
    model, loader = accelerator.prepare(model, DataLoader(rows, batch_size=ROWS))
    model.eval()
    same = []
    for batch, right in zip(loader, expected, strict=True):
        with torch.no_grad():
            outputs = model(**batch)
        same.append(torch.allclose(outputs.loss, right.loss, atol=1e-5))
        gathered = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
        same.append(torch.allclose(gathered[0], right.logits, atol=1e-5))
        same.append(torch.equal(gathered[1], batch["labels"]))
        trained = model(**batch)  # with a loss to train, logits are those of this rank
        same.append(trained.logits.shape[1] == LENGTH // accelerator.num_processes)
        same.append(torch.allclose(accelerator.gather_for_metrics(trained.logits), right.logits, atol=1e-5))
    generated = accelerator.unwrap_model(model).generate(
        batches[0]["input_ids"], max_new_tokens=4, do_sample=False
    )
    same.append(torch.equal(generated, texts))
    with accelerator.unsharded(model):
        same.append(model(input_ids=torch.ones(1, 1, dtype=torch.long)).logits.shape[1] == 1)
    return same


def evaluate_packed() -> list[list[int]]:
    """Returns what is gathered of values for each sample if a collate function packs samples into a row."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    accelerator.prepare(Reader())
    loader = accelerator.prepare(
        DataLoader(range(7), batch_size=3, collate_fn=lambda rows: torch.tensor([rows]))
    )
    return [accelerator.gather_for_metrics(row[0, :1].repeat(3)).tolist() for row in loader]


def test_values_are_gathered_once_for_each_sample_of_a_packed_row(run: Run) -> None:
    assert run(evaluate_packed) == [[[0, 0, 0], [3, 3, 3], [6]]] * 2


def test_an_evaluation_has_whole_outputs_and_generates_as_one_rank(run: Run) -> None:
    for same in run(evaluate, {"sp_size": 2}):
        assert all(same), same


# Functions of the user


def local_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with weights that are normalized by their sum, for [batch, sequence, heads, size]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key).exp()
    weights = scores.tril() / scores.tril().sum(-1, keepdim=True)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


class OwnAttention(Reader):
    """Calls a function of the user."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attention = attention

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(-1, (8, 8)) for each in self.heads(hidden).chunk(3, -1))
        return self.mix(self.attention(*heads).flatten(2))


def attend_by_function() -> float:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    set_seed(0)
    model = OwnAttention(sequence_parallel_attention(local_attention, head_dim=2))
    batch = batch_of("own uneven", 0)
    batch.pop("labels")
    expected = model(**batch)
    return float((accelerator.prepare(model)(**batch) - expected).detach().abs().max())


def test_a_function_of_the_user_computes_whole_sequences(run: Run) -> None:
    assert max(run(attend_by_function)) < 1e-5


class WithContext(Reader):
    """Attends to a context, too."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, context: Any = None) -> Any:
        hidden = self.hidden(tokens, positions)
        query, key = (each.unflatten(-1, (8, 8)).transpose(1, 2) for each in (hidden, context))
        return self.out(F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2))


def attend_to_contexts() -> float:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    set_seed(0)
    model, differences = WithContext(), []
    prepared = accelerator.prepare(copy.deepcopy(model))
    for length, size in ((24, 5), (24, 12), (24, 24), (23, 11)):  # 11 and 12 are those of a rank
        batch = {name: tensor[:, :length] for name, tensor in batch_of("own", 0).items()}
        batch["context"] = torch.randn(ROWS, size, 64)
        del batch["labels"]
        differences.append(float((prepared(**batch) - model(**batch)).detach().abs().max()))
    return max(differences)


def test_a_context_may_be_as_long_as_the_part_of_a_rank(run: Run) -> None:
    assert max(run(attend_to_contexts)) < 1e-5


class WithMemory(Reader):
    """Attends to a learned memory of 12 positions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 8, 12, 8))

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        query = hidden.unflatten(-1, (8, 8)).transpose(1, 2)
        memory = self.memory.expand(len(hidden), -1, -1, -1)
        recalled = F.scaled_dot_product_attention(query, memory, memory)
        return super().attend(hidden) + recalled.transpose(1, 2).flatten(2)


def attend_to_memory() -> float:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    set_seed(0)
    model, differences = WithMemory(), []
    prepared = accelerator.prepare(copy.deepcopy(model))
    for length in (25, 22, 23, 24):  # ranks have 13 and 12, 11, 12 and 11, and 12 positions
        batch = {name: tensor[:, :length] for name, tensor in batch_of("own uneven", 0).items()}
        del batch["labels"]
        differences.append(float((prepared(**batch) - model(**batch)).detach().abs().max()))
    return max(differences)


def test_a_memory_may_be_as_long_as_the_part_of_a_rank(run: Run) -> None:
    assert max(run(attend_to_memory)) < 1e-5


class Scoring(Reader):
    """Returns the log-probabilities of tokens beside its loss."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Any:
        loss, guesses = super().forward(tokens, positions, labels)
        return loss, guesses.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def train_by_scores() -> float:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    set_seed(0)
    model, batch = Scoring(), batch_of("own uneven", 0)
    models = [model, accelerator.prepare(copy.deepcopy(model))]
    mask = (batch["tokens"] % 3 == 0).float()
    for each in models:
        loss, scores = each(**batch)
        accelerator.backward(loss + (scores * mask).sum() / mask.sum())
    pairs = zip(*(each.parameters() for each in models), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def test_a_loss_depends_on_numbers_for_each_position(run: Run) -> None:
    assert max(run(train_by_scores)) < 1e-5


# Errors


class MeanOver(Reader):
    """Adds the mean over a sequence."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, positions)
        return hidden + hidden.mean(1, keepdim=True)


class OtherInTraining(Reader):
    """Draws a factor of its loss in training."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: Any = None) -> Any:
        loss, guesses = super().forward(tokens, positions, labels)
        return (loss * random.random() if self.training else loss), guesses


class Dropping(Reader):
    """Drops its attention in training."""

    drops = True

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mix(hidden) if self.training and self.drops else super().attend(hidden)


class PoolingInTraining(Reader):
    """Adds the mean over a sequence in training."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, positions)
        return hidden + hidden.mean(1, keepdim=True) if self.training else hidden


class PoolingLater(Reader):
    """Adds the mean over a sequence from its fourth forward."""

    num_calls = 0

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        hidden = super().hidden(tokens, positions)
        return hidden + hidden.mean(1, keepdim=True) if self.num_calls >= 4 else hidden


class Scattering(Reader):
    """Adds noise that depends on the length of a sequence in training."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, positions)
        return hidden + torch.rand_like(hidden) / hidden.shape[1] if self.training else hidden


class DroppingPaths(Reader):
    """Drops the attention of whole rows in training, of which the first comparison keeps all."""

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(hidden), 1, 1) > 0.1 if self.training else 1.0
        return super().attend(hidden) * kept


class Centering(Reader):
    """Keeps a mean over positions, which its next evaluation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(64))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, positions)
        if not self.training:
            return hidden - self.center
        with torch.no_grad():
            self.center.lerp_(hidden.mean((0, 1)), 0.1)
        return hidden


class Counted(Reader):
    """Counts its calls in an attribute and in a buffer, and computes the same."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.register_buffer("count", torch.zeros(()))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count += 1
        torch.rand(())  # which nothing depends on
        return F.dropout(super().hidden(tokens, positions), 0.0, self.training) * self.num_calls


class Packing(Reader):
    """Returns its loss in an object."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: Any = None) -> Any:
        loss, _ = super().forward(tokens, positions, labels)
        return SimpleNamespace(loss=loss)


class Noting(Reader):
    """Keeps a mean over positions in an attribute."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, positions)
        self.auxiliary = hidden.square().mean()
        return hidden


class Renormalizing(Reader):
    """Changes the embeddings of the tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 64, max_norm=1.0)


class Keeper:
    """Object of the user."""

    def __init__(self) -> None:
        self.total = 0


class Stateful(Reader):
    """Depends on state of all kinds, which each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.seen, self.array = Counter(), set(), np.zeros(1)
        self.keeper, self.tensor, self.lists = Keeper(), torch.zeros(()), {"calls": [0.0]}
        self.draws, self.numbers = random.Random(0), np.random.default_rng(0)
        self.teacher = [nn.Linear(1, 1, bias=False)]
        nn.init.ones_(self.teacher[0].weight)
        self.register_parameter("average", nn.Parameter(torch.ones(()), requires_grad=False))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        self.seen.add(len(self.seen))
        self.array += 1
        self.keeper.total += 1
        self.tensor += 1
        self.lists["calls"].append(1.0)
        with torch.no_grad():
            self.teacher[0].weight.mul_(1.5)
            self.average.mul_(0.5)
        while torch.rand(2).min() > 0.5:
            pass
        factor = self.counts["calls"] + len(self.seen) + self.array.item() + self.keeper.total + self.tensor
        factor = factor + len(self.lists["calls"]) + self.draws.random() + self.numbers.random()
        factor = factor + self.teacher[0].weight.detach().sum() + self.average
        return super().hidden(tokens, positions) * factor


class CountingLabels(Reader):
    """Returns the number of labels that count."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: Any = None) -> Any:
        return *super().forward(tokens, positions, labels), (labels != -1).sum()


class Normalizing(Reader):
    """Has statistics over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)


class Scaling(Reader):
    """Scales hidden states by the mean of features, which are no sequence."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, features: Any = None) -> Any:
        return self.out(self.hidden(tokens, positions) * features.mean(1)[:, None, None])


class Delaying(Reader):
    """Adds the hidden state 18 positions before."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, positions)
        return hidden + F.pad(hidden, (0, 0, 18, 0))[:, : hidden.shape[1]]


class Shifting(Reader):
    """Shifts labels in its forward."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: Any = None) -> Any:
        guesses = self.out(self.hidden(tokens, positions))
        loss = F.cross_entropy(guesses[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)
        return loss, guesses


class CachingPositions(Reader):
    """Counts positions, and keeps them for the next forward with as many."""

    kept: Any = None

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept.shape[0] != tokens.shape[1]:
            self.kept = torch.arange(tokens.shape[1])
        return super().hidden(tokens, self.kept.expand_as(tokens))


class CountingOthers(Reader):
    """Counts positions in a function that counts something else, too."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        counted = [torch.arange(length) for length in (tokens.shape[1], 3)]
        return super().hidden(tokens, counted[0].expand_as(tokens))


class SlicingPositions(Reader):
    """Has a table of positions."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        table = self.positions.weight[: tokens.shape[1]]
        hidden = self.tokens(tokens) + table
        return hidden + self.attend(hidden)


class Masking(Reader):
    """Creates a mask for the positions that it gets."""

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [each.unflatten(-1, (8, 8)).transpose(1, 2) for each in self.heads(hidden).chunk(3, -1)]
        mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.mix(attended.transpose(1, 2).flatten(2))


class Recurrent(Reader):
    """Has a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(64, 64)


class OwnSoftmax(Reader):
    """Computes attention itself."""

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [each.unflatten(-1, (8, 8)) for each in self.heads(hidden).chunk(3, -1)]
        return self.mix(local_attention(*heads).flatten(2))


def _call(accelerator: Accelerator, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    return accelerator.prepare(model)(**batch)


def _call_often(accelerator: Accelerator, model: nn.Module) -> None:
    model = accelerator.prepare(model)
    for step in range(8):
        model(**batch_of("own", step))


def _with_other_draws(accelerator: Accelerator) -> None:
    random.seed(accelerator.process_index)
    _call(accelerator, OtherInTraining(), batch_of("own", 0))


def _with_other_states(accelerator: Accelerator) -> None:
    model = accelerator.prepare(DroppingPaths())
    set_seed(0)
    model(**batch_of("own", 0))  # with the same numbers on all ranks
    set_seed(0, device_specific=True)
    model(**batch_of("own", 1))


def _dropped(accelerator: Accelerator) -> None:
    model = Dropping()
    model.drops = False
    prepared = accelerator.prepare(model)
    for step in range(3):  # the second forward is compared, and not the third one
        model.drops = step == 2
        prepared(**batch_of("own", step))


def _in_block(accelerator: Accelerator) -> None:
    model, batch = accelerator.prepare(Reader()), batch_of("own", 0)
    whole = batch.pop("labels")
    buffers = [batch["tokens"], batch["positions"]]
    with accelerator.maybe_context_parallel(buffers, [1, 1]):
        F.cross_entropy(model(**batch).flatten(0, 1), whole.flatten(), ignore_index=-1)


def _of_rank(accelerator: Accelerator) -> None:
    _call(accelerator, Reader(), batch_of("own", accelerator.process_index))


def _of_length(accelerator: Accelerator) -> None:
    length = LENGTH - 2 * accelerator.process_index
    _call(accelerator, Reader(), {name: each[:, :length] for name, each in batch_of("own", 0).items()})


def _beyond_the_table(accelerator: Accelerator) -> None:
    batch = batch_of("own", 0)
    batch["positions"] += 64 - LENGTH + 1  # on the last rank only
    _call(accelerator, Reader(), batch)


def _of_gradients(accelerator: Accelerator) -> None:
    model = Reader()
    loss, _ = _call(accelerator, model, batch_of("own", 0))
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def _of_logits_beside_a_loss(accelerator: Accelerator) -> None:
    loss, guesses = _call(accelerator, Reader(), batch_of("own", 0))
    accelerator.backward(loss + guesses.logsumexp(-1).mean())


def _compiled_later(accelerator: Accelerator) -> None:
    torch.compile(accelerator.prepare(Reader()), backend="eager")(**batch_of("own", 0))


def _features(accelerator: Accelerator) -> None:
    model, batch = accelerator.prepare(Scaling()), batch_of("own", 0)
    batch["labels"] = torch.arange(ROWS * 20.0).view(ROWS, 20)  # as many as there are positions below
    model(*batch.values())
    model(batch["tokens"][:, :20], batch["positions"][:, :20], batch["labels"])


def _short(accelerator: Accelerator) -> None:
    _call(accelerator, Reader(), {name: tensor[:, :1] for name, tensor in batch_of("own", 0).items()})


def _buffers(accelerator: Accelerator) -> None:
    accelerator.prepare(Reader())
    accelerator.maybe_context_parallel([torch.zeros(2, 4), torch.zeros(2, 5)], [1, 1])


def _heads(accelerator: Accelerator) -> None:
    import transformers

    sizes = {**SIZES, "num_attention_heads": 1, "num_key_value_heads": 1}
    accelerator.prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


def _own_function(accelerator: Accelerator) -> None:
    model = OwnAttention(sequence_parallel_attention(local_attention, head_dim=2))
    _call(accelerator, model, batch_of("own", 0))


MISTAKES: dict[str, tuple[Callable[[Accelerator], Any], str]] = {
    "mean": (lambda a: _call(a, MeanOver(), batch_of("own", 0)), "computes other outputs"),
    "loss in training": (_with_other_draws, "in training is .* on the ranks"),
    "dropped": (_dropped, "0 attention layers .* 1 in its comparison"),
    "none in training": (
        lambda a: _call(a, Dropping(), batch_of("own", 0)),
        "has not called an attention function",
    ),
    "pooled in training": (lambda a: _call(a, PoolingInTraining(), batch_of("own", 0)), "computes other out"),
    "object": (lambda a: _call(a, Packing(), batch_of("own", 0)), "object of type SimpleNamespace"),
    "attribute": (lambda a: _call(a, Noting(), batch_of("own", 0)), "other values to auxiliary"),
    "embeddings": (lambda a: _call(a, Renormalizing(), batch_of("own", 0)), "tokens.weight other values"),
    "pooled later": (lambda a: _call_often(a, PoolingLater()), "computes other outputs"),
    "noise": (lambda a: _call(a, Scattering(), batch_of("own", 0)), "computes other outputs"),
    "draws of rows": (_with_other_states, r"draws numbers for whole sequences \(rand of shape \[2, 1, 1\]\)"),
    "buffer": (lambda a: _call(a, Centering(), batch_of("own", 0)), "gives center other values"),
    "number": (lambda a: _call(a, CountingLabels(), batch_of("own", 0)), "computes other outputs"),
    "statistics": (lambda a: a.prepare(Normalizing()), "BatchNorm1d.*computes statistics over positions"),
    "delay": (lambda a: _call(a, Delaying(), batch_of("own", 0)), "computes other outputs"),
    "shifted labels": (lambda a: _call(a, Shifting(), batch_of("own", 0)), "labels that the model shifts"),
    "cached": (lambda a: _call(a, CachingPositions(), batch_of("own", 0)), "positions must be an argument"),
    "others": (lambda a: _call(a, CountingOthers(), batch_of("own", 0)), "positions must be an argument"),
    "table": (lambda a: _call(a, SlicingPositions(), batch_of("own", 0)), "positions must be an argument"),
    "mask of a shard": (lambda a: _call(a, Masking(), batch_of("own", 0)), "Masks are those of whole"),
    "compiled": (lambda a: a.prepare(torch.compile(Reader(), backend="eager")), "is compiled"),
    "compiled later": (_compiled_later, "is compiled after prepare"),
    "recurrent": (lambda a: a.prepare(Recurrent()), "GRU.*carries a state over positions"),
    "own softmax": (lambda a: _call(a, OwnSoftmax(), batch_of("own", 0)), "has not called an attention"),
    "other batches": (_of_rank, "have different batches"),
    "other lengths": (_of_length, "have different batches"),
    "beyond the table": (_beyond_the_table, "index out of range"),
    "gradients": (_of_gradients, "create_graph=True"),
    "logits beside a loss": (_of_logits_beside_a_loss, "beside its own loss"),
    "features": (_features, "computes other outputs"),
    "short": (_short, "sequences of 1 positions"),
    "lengths": (_buffers, "different lengths"),
    "whole labels": (_in_block, "48 labels of whole"),
    "heads": (_heads, "has 1 attention heads"),
}


def make_mistake(name: str, sizes: dict[str, int]) -> str:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes, sp_backend="torch"))
    try:
        MISTAKES.get(name, (_own_function,))[0](accelerator)
    except (ConfigurationError, PreparationError, IndexError) as error:
        return str(error)
    return "no error"


def make_mistakes(sizes: dict[str, int]) -> dict[str, str]:
    said = {}
    for name in [*MISTAKES, *(["own function"] if "cp_size" in sizes else [])]:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        said[name] = make_mistake(name, sizes)
    return said


def test_what_cannot_be_exact_is_refused_on_all_ranks(run: Run) -> None:
    for said in run(make_mistakes, {"sp_size": 2}):
        for name, (_, reason) in MISTAKES.items():
            assert re.search(reason, said[name]), (name, said[name])


# Other uses of a model


class Failing(torch.autograd.Function):
    """Raises an error in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise MemoryError


def use_freely() -> dict[str, Any]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    set_seed(0)
    model, batch = _llama(2), batch_of("grouped", 0)
    logits = torch.randn(4, TOKENS)
    total = F.cross_entropy(logits, torch.arange(4), reduction="sum")
    expected = model(**batch, output_hidden_states=True)
    count = (batch["labels"][:, 1:] != -100).sum()
    own = Reader()
    prepared, _ = accelerator.prepare(model, own)
    found = prepared(**batch, num_items_in_batch=count, output_hidden_states=True)
    embedded = Failing.apply(model.model.embed_tokens(batch["input_ids"]))
    with pytest.raises(MemoryError):
        model(inputs_embeds=embedded, labels=batch["labels"]).loss.backward()
    after_error = F.cross_entropy(logits, torch.arange(4), reduction="sum")
    again = model(**batch)
    with torch.device("cpu"):  # a mode of torch functions
        in_mode = model(**batch)
    return {
        "loss": abs(float(found.loss.detach()) - float(expected.loss.detach())),
        "states": len(found.hidden_states) - len(expected.hidden_states),
        "after an error": float(after_error - total),
        "again": abs(float(again.loss.detach()) - float(expected.loss.detach())),
        "in a mode": float((in_mode.loss - again.loss).detach()),
        "copy": float((copy.deepcopy(model)(**batch).loss - again.loss).detach()),
        "pickled": float(not hasattr(pickle.loads(pickle.dumps(own)), "tokens")),
    }


def call_counted(kind: type[Reader]) -> float:
    """Returns the largest difference of a model whose outputs depend on its calls before."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="torch"))
    set_seed(0)
    model = kind()
    torch.manual_seed(accelerator.process_index)
    prepared, differences = accelerator.prepare(copy.deepcopy(model)), []
    for step in range(5):
        batch = batch_of("own", step)
        del batch["labels"]
        differences.append(float((prepared(**batch) - model(**batch)).detach().abs().max()))
    return max(differences)


@pytest.mark.parametrize("kind", [Counted, Stateful])
def test_a_comparison_does_not_count_as_a_call(run: Run, kind: type[Reader]) -> None:
    assert max(run(call_counted, kind)) < 1e-3


def test_a_model_is_used_as_on_one_rank(run: Run) -> None:
    for found in run(use_freely):
        assert all(abs(value) < 1e-5 for value in found.values()), found


def _roberta(accelerator: Accelerator) -> None:
    import transformers

    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES, **NO_DROPOUT))
    _call(accelerator, model, batch_of("bidirectional", 0))


def _opt(accelerator: Accelerator) -> None:
    import transformers

    config = transformers.OPTConfig(**{**SIZES, "word_embed_proj_dim": 64, "ffn_dim": 96})
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    _call(accelerator, transformers.OPTForCausalLM(config), {**batch_of("dense", 0), "attention_mask": mask})


MISTAKES["positions from a mask"] = (_opt, "derives positions from its attention_mask")
MISTAKES["positions from padding"] = (_roberta, "positions must be an argument")
