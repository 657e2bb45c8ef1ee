"""Model FLOPs of a step by `Accelerator.count_flops`, compared with closed forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.accelerator import flops
from accelerate.plugins import ActivationCheckpointing
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.usefixtures("states")

ROWS, LENGTH, HIDDEN, INNER, VOCABULARY, BLOCKS, EXPERTS = 2, 32, 64, 128, 96, 2, 4
TOKENS = ROWS * LENGTH
LAYERS = (
    4 * 2 * HIDDEN * HIDDEN
)  # multiplications of an attention block with as many heads as key-value heads
SCORES = 2 * 2 * LENGTH * HIDDEN  # per token: queries times keys, and their weights times values
LLAMA_ATTENTION = LAYERS - 2 * HIDDEN * HIDDEN  # half as many key-value heads
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}


def forward_flops(per_block: int) -> int:
    """Returns the FLOPs of a forward pass from those of a token in a block."""
    return TOKENS * (BLOCKS * per_block + 2 * HIDDEN * VOCABULARY)


LLAMA = forward_flops(LLAMA_ATTENTION + SCORES + 3 * 2 * HIDDEN * INNER)
MODELS = {
    "GPT2": ({**GPT, "vocab_size": VOCABULARY}, forward_flops(LAYERS + SCORES + 2 * 2 * HIDDEN * 4 * HIDDEN)),
    "Llama": (SIZES, LLAMA),
    "Mixtral": (
        {**SIZES, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        forward_flops(LLAMA_ATTENTION + SCORES + 2 * HIDDEN * EXPERTS + 2 * 3 * 2 * HIDDEN * INNER),
    ),
}


def build(name: str, attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0])
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-any-return]


def train(accelerator: Accelerator, model: nn.Module, steps: int = 3, counts: bool = True) -> list[float]:
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        with accelerator.count_flops() if counts else torch.enable_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_decoder_has_the_flops_of_its_closed_form(name: str, attention: str) -> None:
    accelerator = Accelerator(cpu=True)
    train(accelerator, build(name, attention))
    times = accelerator.step_times()
    assert times.step_flops == pytest.approx(3 * MODELS[name][1], rel=0.01)
    assert times.flops_per_second == pytest.approx(times.step_flops * times.steps / times.seconds)
    assert times.mfu is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_by_the_model_does_not_count(reentrant: bool) -> None:
    accelerator, model = Accelerator(cpu=True), build("Llama")
    for module in model.modules():  # as transformers sets it
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)
    model.train()
    train(accelerator, model)
    assert accelerator.step_times().step_flops == pytest.approx(3 * LLAMA, rel=0.01)


@pytest.mark.parametrize("options", [{}, {"save_operators": "matmul"}, {"every": 2}], ids=str)
def test_recomputation_by_the_accelerator_does_not_count(options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ActivationCheckpointing(**options)])
    train(accelerator, build("Llama"))
    assert accelerator.step_times().step_flops == pytest.approx(3 * LLAMA, rel=0.01)


def test_a_count_changes_no_result() -> None:
    losses = [train(Accelerator(cpu=True), build("Llama"), counts=counts) for counts in (True, False)]
    assert losses[0] == losses[1]


class Layer(nn.Module):
    """A layer without gradients of its input, so its backward pass has the FLOPs of its forward pass."""

    FLOPS = 2 * 4 * 3 + 2 * 4 * 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


Step = Callable[[int], None]


def prepare_layer(accelerator: Accelerator) -> tuple[Any, Any, Step]:
    """Returns a model, its optimizer, and a function that trains a batch of so many rows."""
    model = Layer()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train_batch(rows: int) -> None:
        accelerator.backward(model(torch.ones(rows, 4)))

    return model, optimizer, train_batch


def test_all_micro_batches_of_the_second_step_count() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, train_batch = prepare_layer(accelerator)
    for rows in range(1, 13):
        with accelerator.accumulate(model), accelerator.count_flops():
            train_batch(rows)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.step_times().step_flops == (4 + 5 + 6) * Layer.FLOPS


def test_micro_batches_that_the_loop_accumulates_itself_count() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, train_batch = prepare_layer(accelerator)
    for rows in range(1, 9):
        with accelerator.count_flops():
            train_batch(rows)
        if rows % 2 == 0:
            optimizer.step()
    assert accelerator.step_times().step_flops == (3 + 4) * Layer.FLOPS


def test_a_block_with_a_whole_step_counts_once_inside_of_another_one() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, train_batch = prepare_layer(accelerator)
    for _ in range(3):
        with accelerator.count_flops():
            for rows in (1, 2):
                with accelerator.count_flops():
                    train_batch(rows)
            optimizer.step()
    assert accelerator.step_times().step_flops == 3 * Layer.FLOPS


def test_after_the_count_the_context_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, train_batch = prepare_layer(accelerator)
    contexts = []
    for _ in range(4):
        contexts.append(accelerator.count_flops())
        with contexts[-1]:
            train_batch(1)
            optimizer.step()
    assert contexts[0] is contexts[2] is contexts[3]
    assert contexts[0] is not contexts[1]


def test_a_step_that_the_scaler_skips_ends_the_count() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepare_layer(accelerator)
    optimizer.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer._attach_patched_step()
    for factor in (1.0, float("inf"), 1.0, 1.0):
        with accelerator.count_flops():
            scaler.scale(model(torch.ones(2, 4)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.step_times().step_flops == 2 * Layer.FLOPS


def test_a_step_that_raises_is_not_counted() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, train_batch = prepare_layer(accelerator)
    train_batch(1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="out of memory"), accelerator.count_flops():
        train_batch(8)
        raise RuntimeError("out of memory")
    assert accelerator.step_times().step_flops == 0
    with accelerator.count_flops():
        train_batch(4)
        optimizer.step()
    assert accelerator.step_times().step_flops == 4 * Layer.FLOPS


def test_gradients_of_gradients_count() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepare_layer(accelerator)
    for _ in range(2):
        with accelerator.count_flops():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accelerator.backward(model(torch.ones(2, 4)), create_graph=True)
            optimizer.step()
            model.weight.grad = None
    assert accelerator.step_times().step_flops == 2 * Layer.FLOPS


def test_recomputation_of_a_loss_outside_of_the_model_does_not_count() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepare_layer(accelerator)
    for _ in range(2):
        with accelerator.count_flops():
            accelerator.backward(checkpoint(model, torch.ones(2, 4), use_reentrant=False))
            optimizer.step()
    assert accelerator.step_times().step_flops == 2 * Layer.FLOPS


@pytest.mark.parametrize("way", ["wrapper", "in place", "function"])
def test_compiled_code_is_not_counted(way: str) -> None:
    torch.compiler.reset()
    accelerator, model = Accelerator(cpu=True), Layer()
    if way == "wrapper":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif way == "in place":
        model.compile(backend="eager")

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager") if way == "function" else double
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        with accelerator.count_flops():
            accelerator.backward(model(compiled(torch.ones(2, 4))))
            optimizer.step()
    times = accelerator.step_times()
    torch.compiler.reset()
    assert (times.step_flops, times.flops_per_second, times.mfu) == (0, 0, None)


def hide_kernels(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "__module__", "transformer_engine.pytorch.module.linear")


def hold_gradients(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.strategies.base.Strategy.holds_gradients", False)


@pytest.mark.parametrize("hide", [hide_kernels, hold_gradients])
def test_kernels_that_are_no_operators_are_not_counted(
    hide: Callable[[nn.Module, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_batch = prepare_layer(accelerator)
    hide(model, monkeypatch)
    for _ in range(3):
        with accelerator.count_flops():
            train_batch(1)
            optimizer.step()
    assert accelerator.step_times().step_flops == 0


def test_mfu_is_the_part_of_the_peak_that_the_user_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_PEAK_TFLOPS", "0.5")
    accelerator = Accelerator(cpu=True)
    _, optimizer, train_batch = prepare_layer(accelerator)
    for _ in range(3):
        with accelerator.count_flops():
            train_batch(1)
            optimizer.step()
    before = accelerator.step_times()
    assert before.mfu == pytest.approx(before.flops_per_second / 0.5e12)
    train_batch(1)
    optimizer.step()
    since = accelerator.step_times() - before
    assert (since.steps, since.step_flops, since.peak_flops) == (1, Layer.FLOPS, 0.5e12)


def test_the_peak_is_that_of_the_dtype_in_which_most_flops_are_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(flops, "find_peak_flops", lambda name, dtype: asked.append(dtype))
    for precision in ("no", "bf16"):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        _, optimizer, train_batch = prepare_layer(accelerator)
        for _ in range(2):
            with accelerator.count_flops():
                train_batch(1)
                optimizer.step()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert asked == ["float32", "bfloat16"]


def test_items_of_accumulated_steps_and_windows_are_summed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _ = prepare_layer(accelerator)
    for _ in range(4):
        with accelerator.accumulate(model, num_items=3):
            accelerator.backward(model(torch.ones(3, 4)))
            optimizer.step()
    assert accelerator.step_times().items == 12
    loader = accelerator.prepare(DataLoader(torch.ones(8, 4), batch_size=2))  # type: ignore[arg-type]
    for num_items in (len, None):
        for window in accelerator.windows(loader, num_items=num_items):
            for batch in window:
                accelerator.backward(model(batch))
            optimizer.step()
    times = accelerator.step_times()
    assert times.items == 12 + 8
    assert times.items_per_second == pytest.approx(20 / times.seconds)


class TestFormulas:
    """Formulas of operators that torch has none for, or that compute attention scores again."""

    def count(self, name: str, *args: Any, **kwargs: Any) -> float:
        return flops._find_formulas()[getattr(torch.ops.aten, name)](*args, **kwargs, out_val=None)

    def test_grouped_products_count_the_rows_of_their_groups(self) -> None:
        rows, inner, outer, offsets = 10, 3, 5, torch.tensor([4, 8], dtype=torch.int32)
        x, weight, grad = torch.ones(rows, inner), torch.ones(2, inner, outer), torch.ones(rows, outer)
        expected = 2 * 8 * inner * outer
        assert self.count("_grouped_mm", x, weight, offsets) == expected
        assert self.count("_grouped_mm", x.T, grad, offs=offsets) == expected
        assert self.count("_grouped_mm", weight, torch.ones(outer, rows), offsets) == expected
        assert self.count("_grouped_mm", weight, torch.ones(2, outer, 7)) == 2 * 2 * inner * outer * 7

    def test_packed_attention_has_twice_the_flops_in_backward(self) -> None:
        q, offsets = torch.ones(8, 2, 16), torch.tensor([0, 3, 8])
        forward = self.count("_flash_attention_forward", q, q, q, offsets, offsets, 5, 5)
        backward = self.count("_flash_attention_backward", q, q, q, q, q, q, offsets, offsets, 5, 5)
        assert forward == 2 * 2 * (3 * 3 + 5 * 5) * (16 + 16)
        assert backward == 2 * forward

    def test_linear_operators_of_a_backend_have_the_flops_of_products(self) -> None:
        x, weight = torch.ones(2, 3, 4), torch.ones(5, 4)
        assert self.count("linear", x, weight, None) == 2 * 6 * 4 * 5
        assert self.count("linear_backward", x, x, weight, [True, True, True]) == 2 * 2 * 6 * 4 * 5


def test_slices_of_logits_that_are_computed_again_are_counted_once() -> None:
    accelerator, in_backward = Accelerator(cpu=True), False
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    head, labels = nn.Linear(HIDDEN, VOCABULARY), torch.arange(TOKENS) % VOCABULARY
    with flops.FlopMode(lambda: in_backward and torch.is_grad_enabled()) as mode:
        loss = accelerator.lm_loss(hidden, head, labels, shift=False, slice_size=9)
        in_backward = True
        loss.backward()
    assert mode.flops.total() == 3 * 2 * TOKENS * HIDDEN * VOCABULARY
