"""Processes that split sequences train as one process does with full sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.stand_ins.cases import call_for_each
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import ConfigurationError, StateError, is_torch_version
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import TorchContextParallelConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, reduce, set_seed

pytestmark = pytest.mark.skipif(
    is_torch_version("<", "2.13"), reason="context parallelism on the CPU is refused before torch 2.13"
)
Run = Callable[..., list[Any]]
TOKENS, LENGTH, BATCH, STEPS = 17, 16, 2, 6
ATTENTIONS = {
    "by module": lambda *heads: F.scaled_dot_product_attention(*heads, is_causal=True),
    "by name": lambda *heads: scaled_dot_product_attention(*heads, is_causal=True),
    "by keyword": lambda q, k, v: scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True),
    "by causal mask": lambda *heads: F.scaled_dot_product_attention(*heads, attn_mask=_causal(heads[0])),
    "by window": lambda *heads: scaled_dot_product_attention(*heads, attn_mask=_causal(heads[0]).triu(-1)),
    "both ways": lambda *heads: F.scaled_dot_product_attention(*heads),
}


def _causal(heads: torch.Tensor) -> torch.Tensor:
    return torch.ones(heads.shape[-2], heads.shape[-2], dtype=torch.bool).tril()


class Reader(nn.Module):
    """Attends to the tokens before, and predicts the next token; positions are part of the batch."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.attend = ATTENTIONS[attention]
        self.tokens, self.positions = nn.Embedding(TOKENS, 32), nn.Embedding(LENGTH, 32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.mix, self.out = nn.Linear(32, 32), nn.Linear(32, TOKENS)
        self.tp_plan = {**dict.fromkeys(("query", "key", "value"), "colwise"), "mix": "rowwise"}

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        heads = [
            part(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        attended = self.attend(*heads)
        return self.out(hidden + self.mix(attended.transpose(1, 2).flatten(-2)))


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(TOKENS, (24, LENGTH + 1), generator=generator))


def train(
    config: dict[str, Any] | None,
    batch: int,
    rotate: str = "allgather",
    sharded: bool = False,
    attention: str = "by module",
) -> Any:
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module"
    )  # the guesses are a view; they are not written to
    set_seed(0)
    options: dict[str, Any] = {}
    if config is not None:
        handler = TorchContextParallelConfig(cp_comm_strategy=rotate)
        options["parallelism_config"] = ParallelismConfig(**config, cp_handler=handler)
    if sharded:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(**options)
    model = Reader(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(texts(), batch_size=batch))
    losses, norms = [], []
    for whole in loader:
        tokens, labels = whole[:, :-1].clone(), whole[:, 1:].clone()
        labels[:, : LENGTH // 4] = -100  # ranks have other numbers of labels
        positions = torch.arange(LENGTH).expand(len(tokens), -1).clone()
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], {tokens, labels}):
            guesses = model(tokens, positions)
            loss = F.cross_entropy(guesses.flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        assert positions.shape == (len(tokens) if config is None else batch, LENGTH)  # whole again
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses[:STEPS], norms[:STEPS]


@pytest.fixture(scope="module")
def alone() -> dict[int, Any]:
    """Losses and norms of one process, by the size of its batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        from accelerate.state import AcceleratorState, GradientState

        found = {}
        for batch in (BATCH, 2 * BATCH):
            found[batch] = train(None, batch)
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        return found


def check(ranks: list[Any], expected: Any, case: Any = "") -> None:
    for losses, norms in ranks:
        assert losses == pytest.approx(expected[0], abs=1e-5), case
        assert norms == pytest.approx(expected[1], abs=1e-5), case


def test_two_processes_that_share_each_sequence_train_as_one(run: Run, alone: dict[int, Any]) -> None:
    """With each rotation, with each implementation of attention, and with sharded parameters."""
    cases: list[Any] = [("allgather",), ("alltoall",), ("allgather", True)]
    cases += [("allgather", False, attention) for attention in ("by name", "by causal mask", "by keyword")]
    given = [({"cp_size": 2}, BATCH, *case) for case in cases]
    found = zip(*run(call_for_each, train, given, timeout=120), strict=True)
    for case, ranks in zip(cases, found, strict=True):
        check(ranks, alone[BATCH], case)


def train_refused(attention: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train({"cp_size": 2}, BATCH, attention=attention)
    return str(caught.value)


def test_attention_that_is_not_causal_is_refused(run: Run) -> None:
    for by_window, both_ways in run(call_for_each, train_refused, ["by window", "both ways"]):
        assert "attn_mask" in by_window
        assert "is_causal=False" in both_ways


SHAPES = {"shorter values": (4, 4), "longer values": (4, 16), "one key and value": (1, 8)}


def attend_to_shards(name: str) -> None:
    set_seed(0)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    accelerator.prepare(nn.Linear(2, 2))
    kv_heads, size = SHAPES[name]
    heads = [
        torch.randn(2, count, LENGTH, width) for count, width in ((4, 8), (kv_heads, 8), (kv_heads, size))
    ]
    weights = torch.randn(2, 4, LENGTH, size)
    results = attend_with_gradients(heads, weights)
    buffers = [*heads, weights, *results]
    with accelerator.maybe_context_parallel(buffers, [2] * len(buffers)):
        for result, expected in zip(attend_with_gradients(heads, weights), results, strict=True):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def attend_with_gradients(heads: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    inputs = [part.clone().requires_grad_() for part in heads]
    output = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return [output.detach().clone(), *torch.autograd.grad((output * weights).sum(), inputs)]


def test_attention_with_heads_of_other_shapes_equals_that_of_one_process(run: Run) -> None:
    run(call_for_each, attend_to_shards, list(SHAPES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "sharded"),
    [
        ({"dp_replicate_size": 2, "cp_size": 2}, False),
        ({"dp_shard_size": 2, "cp_size": 2}, True),
        ({"cp_size": 2, "tp_size": 2}, False),
        ({"cp_size": 2, "tp_size": 2}, True),
    ],
)
def test_groups_of_processes_share_each_sequence(
    run: Run, alone: dict[int, Any], config: dict[str, Any], sharded: bool
) -> None:
    ranks = run(train, config, BATCH, "allgather", sharded, processes=4, timeout=120)
    check(ranks, alone[BATCH if "tp_size" in config else 2 * BATCH])


def make_mistakes() -> list[str]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    said = []
    batch = torch.zeros(2, 16)
    with pytest.raises(StateError) as early:
        accelerator.maybe_context_parallel([batch], [1])
    accelerator.prepare(nn.Linear(2, 2))
    for buffers, dims in (([], []), ([batch], []), ([batch], [2]), ([torch.zeros(2, 6)], [1])):
        with pytest.raises(ConfigurationError) as caught:
            accelerator.maybe_context_parallel(buffers, dims)
        said.append(str(caught.value))
    return [str(early.value), *said]


def test_mistakes_are_named(run: Run) -> None:
    early, none, dims, dim, length = run(make_mistakes)[0]
    assert "after prepare()" in early
    assert "got no buffers" in none
    assert "0 entries for 1 buffers" in dims
    assert "[2, 16]" in dim
    assert "multiple of 4" in length


class Alone(nn.Linear):
    """Computes attention itself."""

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        heads = super().forward(heads)
        return (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads


def attend_by_other_means() -> list[str]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    heads = torch.ones(2, 4, 16, 2)
    models = accelerator.prepare(nn.Linear(2, 2), Alone(2, 2))
    with accelerator.maybe_context_parallel([heads], [2]):
        pass  # no forward
    errors = []
    for model in models:
        with pytest.raises(ConfigurationError) as caught, accelerator.maybe_context_parallel([heads], [2]):
            model(heads)
        errors.append(str(caught.value))
    return errors


def test_attention_without_context_parallelism_is_refused(run: Run) -> None:
    for called, computed in run(attend_by_other_means):
        assert "Linear" in called
        assert "attn_implementation='sdpa'" in called
        assert "by the softmax of scores of shape [2, 4, 8, 8]" in computed


def replace_the_context() -> tuple[list[Any], bool]:
    """As clients do: `_prepare_cp` is theirs, and sets the context."""
    seen: list[Any] = []

    class Replaced(Accelerator):
        def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
            self._cp_context = lambda **given: seen.append(sorted(given)) or torch.no_grad()
            return args

    accelerator = Replaced(parallelism_config=ParallelismConfig(cp_size=2))
    accelerator.prepare(nn.Linear(2, 2))
    with accelerator.maybe_context_parallel([torch.zeros(2, 16)], [1]):
        return seen, torch.is_grad_enabled()


def test_clients_may_set_the_context(run: Run) -> None:
    for seen, enabled in run(replace_the_context):
        assert seen == [["buffer_seq_dims", "buffers", "no_restore_buffers"]]
        assert not enabled


def evaluate(config: dict[str, Any] | None, samples: int) -> tuple[torch.Tensor, ...]:
    """As the Trainer of transformers does: it keeps the labels before the sequences are sharded."""
    set_seed(0)
    options = {} if config is None else {"parallelism_config": ParallelismConfig(**config)}
    accelerator = Accelerator(**options)
    model = accelerator.prepare(Reader("by module"))
    found = []
    loader = accelerator.prepare(DataLoader(texts()[:samples], batch_size=BATCH))
    for whole in loader:
        tokens, labels = whole[:, :-1].clone(), whole[:, 1:].clone()
        labels[0] = -100  # equal in all shards
        kept, positions = labels.detach(), torch.arange(LENGTH).expand(len(tokens), -1).clone()
        buffers = [tokens, labels, positions]
        with torch.no_grad(), accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            guesses = model(tokens, positions)
            # The sum of this rank's part: the mean over the ranks of the axis is that over all tokens.
            size = 1 if config is None else config["cp_size"]
            loss = F.cross_entropy(guesses.flatten(0, 1), labels.flatten(), reduction="sum") * size
        assert torch.equal(kept[1:], whole[1:, 1:])
        if config is not None and len(whole) > 1:
            with pytest.raises(StateError, match="of shape \\[2\\] that differs between the 2 ranks"):
                accelerator.gather_for_metrics(guesses.mean((1, 2)))
        losses = loss.repeat(len(whole))
        found.append(accelerator.gather_for_metrics((losses, guesses, labels)))
        assert torch.equal(accelerator.gather_for_metrics(kept), found[-1][2])
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


@pytest.mark.parametrize("samples", [4, 5])
def test_an_evaluation_has_whole_sequences_and_the_loss_of_all_shards(
    run: Run, states: None, samples: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        expected = evaluate(None, samples)
    for found in run(evaluate, {"cp_size": 2}, samples):
        assert len(found[0]) == samples
        for mine, theirs in zip(found[:2], expected[:2], strict=True):
            if samples % BATCH:  # the loss of a padded batch counts its padding
                mine, theirs = mine[:4], theirs[:4]
            torch.testing.assert_close(mine, theirs)
        assert torch.equal(found[2], expected[2])


class Mixing(Reader):
    """Combines positions of a sequence by more than attention."""

    def __init__(self, mix: str) -> None:
        super().__init__("by module")
        self.kind = mix
        self.conv, self.recurrent = nn.Conv1d(32, 32, 3), nn.GRU(32, 32, batch_first=True)
        self.normalize, self.drop = nn.LayerNorm(32), nn.Dropout(0.5)
        self.num_calls = 0
        self.register_buffer("center", torch.zeros(32))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.kind == "own positions":
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = self.tokens(tokens) + self.positions(positions)
        heads = [
            part(hidden).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        hidden = hidden + self.mix(self.attend(*heads).transpose(1, 2).flatten(-2))
        if self.kind == "convolution":
            hidden = hidden + self.conv(F.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)
        elif self.kind == "recurrent":
            hidden = self.recurrent(hidden)[0]
        elif self.kind in ("sum", "sum of long sequences"):
            if self.kind != "sum" and tokens.shape[1] < LENGTH // 2:
                raise ValueError("too short")
            hidden = hidden + hidden.cumsum(1) / LENGTH
        elif self.kind == "short sequences" and tokens.shape[1] > LENGTH // 2:
            raise IndexError("too long")
        elif self.kind == "last":
            return self.out(hidden[:, -1])
        elif self.kind == "mean":
            return self.out(hidden.mean(1))
        elif self.kind == "shift":
            hidden = hidden + hidden.roll(1, 1)
        elif self.kind == "in training" and self.training:
            hidden = hidden + hidden.mean(1, keepdim=True)
        elif self.kind == "buffer" and self.training:
            self.center.lerp_(hidden.detach().mean((0, 1)), 0.1)
        elif self.kind == "draws" and self.training:
            hidden = hidden * (torch.rand(len(hidden), 1, 1) > 0.1)
        elif self.kind == "later":
            self.num_calls += 1
            hidden = hidden + hidden.mean(1, keepdim=True) * (self.num_calls >= 4)
        elif self.kind == "right":
            hidden = self.drop(self.normalize(hidden))
        logits: torch.Tensor = self.out(hidden)
        if self.kind == "shifted labels":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return logits


def refuse_mixing(kind: str) -> str:
    set_seed(0)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    model = accelerator.prepare(Mixing(kind))
    tokens = torch.stack(texts()[:BATCH])[:, :-1].contiguous()
    positions = torch.arange(LENGTH).expand(len(tokens), -1).clone()
    try:
        with accelerator.maybe_context_parallel([tokens, positions], [1, 1]):
            if kind == "local positions":
                positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            torch.manual_seed(accelerator.process_index)
            before = torch.get_rng_state()
            model.eval()(tokens, positions)
            assert torch.equal(torch.get_rng_state(), before)
            for _ in range(8 if kind == "later" else 1):
                model.train()(tokens, positions)
    except ConfigurationError as error:
        return str(error)
    return ""


MIXES = {
    "local positions": "counted on each rank",
    "draws": "draws numbers for whole sequences (rand of shape [",
    "buffer": "gives center other values",
    "short sequences": "raises an error on whole sequences (IndexError: too long)",
}


def test_models_that_combine_positions_by_more_than_attention_are_refused(run: Run) -> None:
    kinds = ["convolution", "recurrent", "sum", "last", "mean", "shift", "own positions", "shifted labels"]
    kinds += ["sum of long sequences", "in training", "later", *MIXES, "right"]
    for texts in run(call_for_each, refuse_mixing, kinds, timeout=120):
        found = dict(zip(kinds, texts, strict=True))
        expected = {kind: MIXES.get(kind, "than on whole sequences") for kind in kinds}
        assert {kind: text for kind, text in found.items() if expected[kind] not in text} == {"right": ""}


# Losses outside of the model


def masked_mean(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum()


def mean_of_rows(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def chosen_mean(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")[mask.bool()].mean()


def pooled(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.mean(1), targets[:, 0] * 0)


def of_probabilities(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A focal loss whose sums are over entries of the vocabulary."""
    chosen = F.one_hot(targets.flatten(), logits.shape[-1])
    right = (logits.flatten(0, 1).softmax(-1) * chosen).sum(1)
    return -((1 - right).square() * right.log()).mean()


def plain_mean(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses.mean() + logits.square().mean() + F.mse_loss(logits, torch.ones_like(logits))


def mean_of_all(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / reduce(mask.sum(), "mean")


def divergence(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.kl_div(logits.log_softmax(-1), torch.softmax(logits.detach() * 0.5, -1), reduction="batchmean")


def gradients_of(
    loss_of: Callable[..., torch.Tensor], parallelism: dict[str, Any]
) -> list[torch.Tensor] | str:
    """Returns the gradients of a loss, or the error."""
    set_seed(0)
    model = Mixing("right").eval()
    del model.conv, model.recurrent  # which no forward calls
    tokens = torch.stack(texts()[:BATCH])[:, :-1].contiguous()
    positions = torch.arange(LENGTH).expand(len(tokens), -1).clone()
    targets, mask = tokens.roll(-1, 1).contiguous(), (tokens % 3 == 0).float()
    mask[:, 0] = mask[:, LENGTH // 2] = 1
    if not parallelism:
        loss_of(model(tokens, positions), targets, mask).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**parallelism))
    prepared = accelerator.prepare(model)
    buffers = [tokens, positions, targets, mask]
    try:
        with accelerator.maybe_context_parallel(buffers, [1] * 4, no_restore_buffers=set(buffers)):
            accelerator.backward(loss_of(prepared(tokens, positions), targets, mask))
    except ConfigurationError as error:
        return str(error)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def compare_losses(parallelism: dict[str, Any]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    refused, exact = (masked_mean, mean_of_rows, chosen_mean, pooled), (plain_mean, mean_of_all, divergence)
    for loss_of in (*refused, *exact, of_probabilities):
        expected = gradients_of(loss_of, {}) if loss_of is not mean_of_all else gradients_of(masked_mean, {})
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        grads = gradients_of(loss_of, parallelism)
        if isinstance(grads, str) or isinstance(expected, str):
            found[loss_of.__name__] = grads if isinstance(grads, str) else expected
            continue
        own, right = (torch.cat([each.flatten() for each in tensors]) for tensors in (grads, expected))
        found[loss_of.__name__] = float((own - right).norm() / right.norm())
    return found


@pytest.mark.parametrize("parallelism", [{"cp_size": 2}, {"sp_size": 2, "sp_backend": "torch"}], ids=str)
def test_losses_outside_of_the_model_are_those_of_whole_sequences_or_refused(
    run: Run, parallelism: dict[str, Any]
) -> None:
    for found in run(compare_losses, parallelism):
        for name in ("masked_mean", "mean_of_rows", "chosen_mean", "pooled"):
            assert "different derivatives by the sums over positions" in found[name]
        for name in ("plain_mean", "mean_of_all", "divergence", "of_probabilities"):
            assert found[name] < 1e-3, name


def train_sums(parallelism: dict[str, Any], how: str) -> list[torch.Tensor]:
    """Returns weights after windows of two micro-batches with different numbers of labels."""
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**parallelism) if parallelism else None,
    )
    model: Any = Reader("by module")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(texts(), batch_size=BATCH))

    def count(whole: torch.Tensor) -> torch.Tensor:
        return (whole[:, 1:] % 3 == 0).sum()

    def train_on(whole: torch.Tensor) -> None:
        tokens = whole[:, :-1].clone()
        labels = whole[:, 1:].where(whole[:, 1:] % 3 == 0, -100)
        positions = torch.arange(LENGTH).expand(len(tokens), -1).clone()
        buffers = [tokens, labels, positions]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            inside = (
                accelerator.accumulate(model, num_items=(labels != -100).sum()) if how == "inside" else None
            )
            with inside or nullcontext():
                guesses = model(tokens, positions).flatten(0, 1)
                accelerator.backward(F.cross_entropy(guesses, labels.flatten(), reduction="sum"))
                if how != "windows":
                    optimizer.step()
                    optimizer.zero_grad()

    if how == "windows":
        for window in accelerator.windows(loader, num_items=count):
            for whole in window:
                train_on(whole)
            optimizer.step()
            optimizer.zero_grad()
    else:
        for whole in loader:
            outside = accelerator.accumulate(model, num_items=count(whole)) if how == "outside" else None
            with outside or nullcontext():
                train_on(whole)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["inside", "outside", "windows"])
def test_items_may_be_counted_in_whole_sequences_or_in_parts(run: Run, how: str) -> None:
    expected = run(train_sums, {}, how, processes=1)[0]
    for found in run(train_sums, {"cp_size": 2}, how):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def count_before_ulysses() -> None:
    with pytest.raises(ConfigurationError, match="num_items counts whole sequences"):
        train_sums({"sp_size": 2, "sp_backend": "torch"}, "outside")


def test_items_of_whole_sequences_are_refused_for_parts_of_ulysses(run: Run) -> None:
    run(count_before_ulysses)
