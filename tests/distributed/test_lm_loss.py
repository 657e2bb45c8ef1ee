"""The loss without logits has the value and the gradients of the plain loss in each layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, PreparationError, is_torch_version

Run = Callable[..., list[Any]]
VOCABULARY, WIDTH, LENGTH = 37, 16, 8  # 2 ranks have 19 and 18 entries
LAYOUTS: dict[str, tuple[int, dict[str, int], int | None]] = {
    "one": (1, {}, None),
    "ddp": (2, {}, None),
    "fsdp1": (2, {}, 1),
    "fsdp2": (2, {}, 2),
    "hsdp": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, 2),
    "tp": (2, {"tp_size": 2}, None),
    "fsdp2+tp": (4, {"dp_shard_size": 2, "tp_size": 2}, 2),
}
"""Layout -> number of processes, sizes of the mesh, version of FSDP."""


class Model(nn.Module):
    """Language model that returns its loss, or its hidden states."""

    def __init__(self, ties: bool, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=not ties)
        if ties:
            self.lm_head.weight = self.embedding.weight
        self.loss = loss
        self.tp_plan = {"lm_head": "colwise_rep", "embedding": "embedding_rowwise"}

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            heads = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            hidden = torch.tanh(attended.transpose(1, 2).flatten(2) + block(hidden))
        return hidden if self.loss is None else self.loss(hidden, self.lm_head, labels)


def plain(hidden: Tensor, head: nn.Module, labels: Tensor, reduction: str = "mean") -> Tensor:
    logits = head(hidden)[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction=reduction)


def batches(num_samples: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches of samples with equal numbers of labels, so that the mean of means is that of all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[:, 3] = -100
        found.append((tokens, labels))
    return found


def state_of(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    return {name: each.cpu() for name, each in accelerator.get_state_dict(model).items()}


def train(
    layout: str,
    ties: bool,
    where: str,
    precision: str = "no",
    wraps: str | None = None,
    compiles: bool = False,
) -> Any:
    """Returns the losses and the weights after two steps, of the plain loss for the layout "plain"."""
    processes, mesh, version = LAYOUTS.get(layout, LAYOUTS["one"])
    plugin = None
    if version is not None:
        policy: dict[str, Any] = {}
        if wraps is not None:
            policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": [wraps]}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=True, **policy)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=plugin,
        mixed_precision=precision,
    )

    def lm_loss(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        return accelerator.lm_loss(hidden, head, labels, shift=True, slice_size=5)

    torch.manual_seed(0)
    inside = plain if layout == "plain" else lm_loss
    model: Any = Model(ties, inside if where == "inside" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    if compiles:
        warnings.simplefilter("ignore", DeprecationWarning)  # the compiler instantiates a function
        model = torch.compile(model, backend="eager")
    losses = []
    divided = processes // mesh.get("tp_size", 1)
    index = accelerator.process_index // mesh.get("tp_size", 1) if layout != "plain" else 0
    for tokens, labels in batches(4):
        if layout != "plain":
            tokens, labels = (each.chunk(divided)[index] for each in (tokens, labels))
        output = model(tokens, labels)
        loss = (
            output if where == "inside" else inside(output, accelerator.unwrap_model(model).lm_head, labels)
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, state_of(accelerator, model)


def compare(found: Any, expected: Any, tolerance: float = 1e-5, case: Any = "") -> None:
    assert found[0] == pytest.approx(expected[0], abs=tolerance), case
    if found[1]:
        for name, value in expected[1].items():
            torch.testing.assert_close(
                found[1][name].float(),
                value.float(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{case} {name}: {text}",
            )


@pytest.mark.parametrize("layout", ["one", "ddp", "fsdp2", "tp", "hsdp", "fsdp2+tp"])
def test_training_is_that_of_the_plain_loss(run: Run, layout: str) -> None:
    cases = list(product([False, True], ["inside", "outside"]))  # whether weights are tied, and where
    (expected,) = run(call_for_each, train, [("plain", ties, "inside") for ties, _ in cases], processes=1)
    given = [(layout, *case) for case in cases]
    for found in run(call_for_each, train, given, processes=LAYOUTS[layout][0]):
        for case, result, wanted in zip(cases, found, expected, strict=True):
            compare(result, wanted, case=case)


def test_a_compiled_model_computes_it_with_a_sharded_head(run: Run) -> None:
    (expected,) = run(train, "plain", False, "inside", processes=1)
    for found in run(train, "tp", False, "inside", "no", None, True, processes=2):
        compare(found, expected)


def test_fsdp1_computes_it_in_the_forward(run: Run) -> None:
    expected = run(train, "plain", False, "inside", processes=1)[0]
    for found in run(train, "fsdp1", False, "inside", processes=2):
        compare(found, expected)


def outside_of_fsdp1() -> str:
    with pytest.raises(PreparationError, match="Call lm_loss in the forward") as raised:
        train("fsdp1", False, "outside")
    return str(raised.value)


def test_fsdp1_refuses_it_outside_of_the_forward(run: Run) -> None:
    assert all("FSDP 1" in message for message in run(outside_of_fsdp1, processes=2))


def test_bfloat16_is_that_of_the_plain_loss(run: Run) -> None:
    expected = run(train, "plain", False, "inside", "bf16", processes=1)[0]
    cases = [(layout, False, "outside", "bf16") for layout in ("ddp", "fsdp2")]
    for found in run(call_for_each, train, cases, processes=2):
        for case, result in zip(cases, found, strict=True):
            compare(result, expected, 2e-2, case)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "hsdp"])
def test_a_head_that_is_a_unit_of_its_own_is_gathered(run: Run, layout: str) -> None:
    expected = run(train, "plain", False, "inside", processes=1)[0]
    cases = [(layout, False, where, "no", "Linear") for where in ("inside", "outside")]
    for found in run(call_for_each, train, cases, processes=LAYOUTS[layout][0]):
        for case, result in zip(cases, found, strict=True):
            compare(result, expected, case=case)


def count_collectives(ours: bool, mesh: dict[str, int], wraps: str | None) -> dict[str, int]:
    """Returns the collectives of a forward and backward pass by name."""
    policy: dict[str, Any] = {}
    if wraps is not None:
        policy = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": [wraps]}
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=None if mesh else FullyShardedDataParallelPlugin(fsdp_version=2, **policy),
    )

    def lm_loss(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        return accelerator.lm_loss(hidden, head, labels, shift=True, slice_size=5)

    model = Model(False, lm_loss if ours else plain)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    tokens, labels = batches(2)[0]
    for _ in range(2):  # the first pass of FSDP differs, and gradients of both are compared
        accelerator.backward(model(tokens, labels))
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # of CommDebugMode
    with CommDebugMode() as counted:
        accelerator.backward(model(tokens, labels))
    return {str(name).rpartition(".")[2]: count for name, count in counted.get_comm_counts().items() if count}


def test_a_head_is_gathered_once_and_its_gradient_reduced_once(run: Run) -> None:
    cases = [(ours, {}, wraps) for wraps in ("Linear", None) for ours in (False, True)]
    plain_unit, our_unit, plain_root, our_root = run(call_for_each, count_collectives, cases, processes=2)[0]
    # The plain head is gathered in forward and backward; ours stays gathered.
    assert plain_unit["_allgather_base_"] - our_unit["_allgather_base_"] == 1
    assert plain_unit["_reduce_scatter_base_"] == our_unit["_reduce_scatter_base_"]
    assert plain_root == our_root


def test_a_sharded_vocabulary_has_one_collective_in_each_pass(run: Run) -> None:
    ours = run(count_collectives, True, {"tp_size": 2}, None, processes=2)[0]
    # The embedding has an all-reduce in the forward pass.
    assert ours == {"allgather_": 1, "allreduce_": 1, "all_reduce": 1}


def train_counted(layout: str, empty: bool = False) -> Any:
    """Returns the weights after a window of two micro-batches with different numbers of labels."""
    processes, mesh, version = LAYOUTS.get(layout, LAYOUTS["one"])
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version),
    )

    def lm_loss(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        if layout == "plain":
            return plain(hidden, head, labels, "sum")
        return accelerator.lm_loss(hidden, head, labels, shift=True, reduction="sum", slice_size=5)

    torch.manual_seed(0)
    model: Any = Model(False, lm_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    parts = processes // mesh.get("tp_size", 1) if layout != "plain" else 1
    index = accelerator.process_index // mesh.get("tp_size", 1)
    for _ in range(2):
        for tokens, labels in batches(4):
            labels[0, 2:] = -100
            if empty:
                labels[:2] = -100  # all of the first rank
            tokens, labels = tokens.chunk(parts)[index], labels.chunk(parts)[index]
            with accelerator.accumulate(model, num_items=(labels[:, 1:] != -100).sum()):
                accelerator.backward(model(tokens, labels))
                optimizer.step()
                optimizer.zero_grad()
    return [], state_of(accelerator, model)


@pytest.mark.parametrize("layout", ["one", "ddp", "fsdp2", "hsdp", "tp"])
def test_counted_items_give_the_mean_over_all_labels(run: Run, layout: str) -> None:
    expected = run(call_for_each, train_counted, [("plain", False), ("plain", True)], processes=1)[0]
    cases = [(layout, False), (layout, True)]
    for found in run(call_for_each, train_counted, cases, processes=LAYOUTS[layout][0]):
        for case, result, wanted in zip(cases, found, expected, strict=True):
            compare(result, wanted, case=case)


def train_frozen(ours: bool, layout: str, where: str) -> Any:
    """Trains a head whose hidden states need no gradient."""
    _, mesh, version = LAYOUTS[layout]
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version),
    )

    def lm_loss(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        return accelerator.lm_loss(hidden, head, labels, shift=True, slice_size=5)

    torch.manual_seed(0)
    model: Any = Model(False, (lm_loss if ours else plain) if where == "inside" else None)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for tokens, labels in batches(2):
        output = model(tokens, labels)
        loss = (
            output if where == "inside" else lm_loss(output, accelerator.unwrap_model(model).lm_head, labels)
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [], state_of(accelerator, model)


def test_a_head_alone_is_trained(run: Run) -> None:
    expected = run(train_frozen, False, "one", "inside", processes=1)[0]
    cases = [(True, layout, "inside") for layout in ("ddp", "fsdp2", "tp")]
    for found in run(call_for_each, train_frozen, cases, processes=2):
        for case, result in zip(cases, found, strict=True):
            compare(result, expected, case=case)


def refuse_shards() -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = Model(False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    tokens, labels = batches(2)[0]
    with pytest.raises(PreparationError, match="Call lm_loss in the forward") as raised:
        accelerator.lm_loss(torch.zeros(*tokens.shape, WIDTH), model.lm_head, labels, shift=True)
    return str(raised.value)


def test_a_head_that_is_not_gathered_is_an_error(run: Run) -> None:
    assert all("[19, 16]" in message or "[37, 16]" in message for message in run(refuse_shards, processes=2))


def refuse_unit_of_tensor_parallelism() -> str:
    with pytest.raises(PreparationError, match="Leave it out of the auto_wrap_policy") as raised:
        train("fsdp2+tp", False, "inside", "no", "Linear")
    return str(raised.value)


def test_a_unit_that_tensor_parallelism_shards_is_an_error(run: Run) -> None:
    assert run(refuse_unit_of_tensor_parallelism, processes=4)


def refuse_frozen() -> str:
    with pytest.raises(PreparationError, match="in the forward of the model") as raised:
        train_frozen(True, "fsdp2", "outside")
    return str(raised.value)


def test_a_gradient_that_fsdp_would_not_reduce_is_an_error(run: Run) -> None:
    assert all("Call lm_loss in the forward" in message for message in run(refuse_frozen, processes=2))


def train_shards(mesh: dict[str, int], reduction: Any) -> Any:
    """Returns losses and weights of training on shards of sequences with different numbers of labels."""
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if mesh else None,
    )
    torch.manual_seed(0)
    model: Any = Model(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for tokens, labels in batches(2):
        labels[:, :3] = -100
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        buffers = [tokens, shifted]
        with accelerator.maybe_context_parallel(buffers, [1, 1], set(buffers)):
            hidden = model(tokens, shifted)
            if mesh:
                items = (shifted != -100).sum() if reduction == "sum" else None
                with accelerator.accumulate(model, num_items=items):
                    head = accelerator.unwrap_model(model).lm_head
                    loss = accelerator.lm_loss(hidden, head, shifted, shift=False, reduction=reduction)
                    accelerator.backward(loss)
            else:
                loss = nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), shifted.flatten())
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses if reduction == "mean" else [], state_of(accelerator, model)


@pytest.mark.skipif(is_torch_version("<", "2.13"), reason="context parallelism on the CPU is refused before")
def test_shards_of_sequences_have_the_mean_of_whole_sequences(run: Run) -> None:
    expected = run(train_shards, {}, "mean", processes=1)[0]
    cases = [({"cp_size": 2}, "mean"), ({"cp_size": 2}, "sum")]
    for mean, total in run(call_for_each, train_shards, cases, processes=2):
        compare(mean, expected)
        compare(total, ([], expected[1]))


def refuse_shift() -> str:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(cp_size=2),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    with pytest.raises(ConfigurationError, match=r"^shift=True: sequences are sharded") as raised:
        accelerator.lm_loss(torch.zeros(2, 4), nn.Linear(4, 5), torch.ones(2).long(), shift=True)
    return str(raised.value)


@pytest.mark.skipif(is_torch_version("<", "2.13"), reason="context parallelism on the CPU is refused before")
def test_shards_of_sequences_are_not_shifted(run: Run) -> None:
    assert all("pass shift=False" in message for message in run(refuse_shift, processes=2))


def train_divided(mesh: dict[str, Any], reduction: Any) -> Any:
    """Returns losses and weights of a model whose forward Ulysses divides, and which computes its loss."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**mesh) if mesh else None)

    def loss_of(hidden: Tensor, head: nn.Module, labels: Tensor) -> Tensor:
        if mesh:
            return accelerator.lm_loss(hidden, head, labels, shift=False, reduction=reduction, slice_size=5)
        logits = head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction=reduction)

    torch.manual_seed(0)
    model: Any = Model(False, loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for tokens, labels in batches(2):
        labels[:, :3] = -100
        items = (labels != -100).sum() if reduction == "sum" else None
        with accelerator.accumulate(model, num_items=items):
            loss = model(tokens, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, state_of(accelerator, model)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_divided_forward_has_the_loss_of_whole_sequences(run: Run, reduction: str) -> None:
    expected = run(train_divided, {}, reduction, processes=1)[0]
    for found in run(train_divided, {"sp_size": 2, "sp_backend": "torch"}, reduction, processes=2):
        compare(found, expected)
