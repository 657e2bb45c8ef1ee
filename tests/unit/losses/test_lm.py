"""The value and the gradients are those of torch's cross entropy, and wrong arguments are errors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from accelerate import Accelerator
from accelerate.base import ConfigurationError, StateError
from accelerate.losses import ranks_of_sequences

FEATURES, VOCABULARY = 16, 50
States = Callable[[], None]


@pytest.fixture
def accelerator(states: Any) -> Accelerator:
    torch.manual_seed(0)
    return Accelerator(cpu=True)


def plain(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    shift: bool,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and the log-probabilities that torch computes from all logits."""
    logits = head(hidden).double() * scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    labels = (pad(labels[..., 1:], (0, 1), value=-100) if shift else labels).flatten()
    logits = logits.reshape(len(labels), -1)
    loss = cross_entropy(logits, labels, reduction=reduction, label_smoothing=label_smoothing)
    if z_loss:
        squares = logits.logsumexp(-1).square()[labels != -100]
        loss = loss + z_loss * (squares.mean() if reduction == "mean" else squares.sum())
    return loss.float(), -cross_entropy(logits, labels, reduction="none").float()


def gradients_of(tensors: list[Tensor], total: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, tensors))


def compare(
    accelerator: Accelerator, hidden: Tensor, head: nn.Module, labels: Tensor, **options: Any
) -> None:
    """Compares loss, log-probabilities and gradients of both with those of the plain loss."""
    size = options.pop("slice_size", None)
    tensors = [hidden, *head.parameters()]
    loss, logps = plain(hidden, head, labels, **options)
    factors = torch.randn(logps.shape)
    expected = [loss, logps, *gradients_of(tensors, loss + (factors * logps).sum())]
    loss, logps = accelerator.lm_loss(hidden, head, labels, slice_size=size, return_logps=True, **options)
    assert logps.shape == labels.shape
    logps = logps.flatten()
    found = [loss, logps, *gradients_of(tensors, loss + (factors * logps).sum())]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("shape", [(3, 8), (5,), (2, 2, 4)])
def test_it_is_the_cross_entropy_with_each_option(
    accelerator: Accelerator, shape: tuple[int, ...], shift: bool, reduction: str
) -> None:
    for bias, smoothing, z_loss, scale, cap, size in product(
        (False, True), (0.0, 0.1), (0.0, 0.01), (1.0, 0.7), (None, 2.0), (7, None)
    ):
        head = nn.Linear(FEATURES, VOCABULARY, bias=bias)
        hidden = torch.randn(*shape, FEATURES, requires_grad=True)
        labels = torch.randint(0, VOCABULARY, shape)
        labels[..., 1] = -100
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "scale": scale, "soft_cap": cap}
        compare(
            accelerator, hidden, head, labels, shift=shift, reduction=reduction, slice_size=size, **options
        )


@pytest.mark.parametrize("shift", [True, False])
def test_labels_may_be_bytes(accelerator: Accelerator, shift: bool) -> None:
    hidden, head = torch.randn(2, 5, FEATURES), nn.Linear(FEATURES, 256)
    labels = torch.tensor([[3, 156, 255, 0, 7]] * 2, dtype=torch.uint8)
    loss = accelerator.lm_loss(hidden, head, labels, shift=shift)
    torch.testing.assert_close(loss, plain(hidden, head, labels.long(), shift)[0])


def test_float64_is_exact(accelerator: Accelerator) -> None:
    head, labels = nn.Linear(FEATURES, VOCABULARY).double(), torch.arange(4)
    hidden = torch.randn(4, FEATURES, dtype=torch.float64, requires_grad=True)
    loss = accelerator.lm_loss(hidden, head, labels, shift=False)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, cross_entropy(head(hidden), labels), rtol=1e-14, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_labels_give_the_value_of_torch_and_no_gradient(accelerator: Accelerator, reduction: Any) -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(4, FEATURES, requires_grad=True)
    labels = torch.full((4,), -100)
    expected = cross_entropy(head(hidden), labels, reduction=reduction)
    loss = accelerator.lm_loss(hidden, head, labels, shift=False, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    for gradient in gradients_of([hidden, *head.parameters()], loss):
        assert not gradient.any()


def test_no_tokens_have_a_sum_of_zero(accelerator: Accelerator) -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(2, 0, FEATURES, requires_grad=True)
    labels = torch.zeros(2, 0, dtype=torch.long)
    loss = accelerator.lm_loss(hidden, head, labels, shift=True, reduction="sum")
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients_of(list(head.parameters()), loss))


def test_entries_of_a_bias_of_minus_infinity_have_no_probability(accelerator: Accelerator) -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(4, FEATURES, requires_grad=True)
    with torch.no_grad():
        head.bias[30:] = -torch.inf  # three whole slices
    compare(accelerator, hidden, head, torch.tensor([[3, 0, 29, -100]]).flatten(), shift=False, slice_size=6)


def test_an_index_of_the_vocabulary_can_be_ignored(accelerator: Accelerator) -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(4, FEATURES)
    labels = torch.tensor([0, 3, 0, 7])
    loss = accelerator.lm_loss(hidden, head, labels, ignore_index=0)
    torch.testing.assert_close(loss, cross_entropy(head(hidden), labels, ignore_index=0))


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_frozen_parts_get_no_gradient(accelerator: Accelerator, frozen: str) -> None:
    head = nn.Linear(FEATURES, VOCABULARY).requires_grad_(frozen != "head")
    hidden = torch.randn(4, FEATURES, requires_grad=frozen != "hidden")
    tensors = [each for each in (hidden, *head.parameters()) if each.requires_grad]
    labels = torch.arange(4)
    expected = gradients_of(tensors, cross_entropy(head(hidden), labels))
    found = gradients_of(tensors, accelerator.lm_loss(hidden, head, labels, shift=False))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_computed_without_gradients(accelerator: Accelerator, mode: Any) -> None:
    head, hidden, labels = nn.Linear(FEATURES, VOCABULARY), torch.randn(4, FEATURES), torch.arange(4)
    with mode():
        loss = accelerator.lm_loss(hidden, head, labels, shift=False)
        torch.testing.assert_close(loss, cross_entropy(head(hidden), labels))
    assert not loss.requires_grad


def test_a_graph_may_be_used_twice(accelerator: Accelerator) -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(4, FEATURES, requires_grad=True)
    loss = accelerator.lm_loss(hidden, head, torch.arange(4), shift=False)
    accelerator.backward(loss, retain_graph=True)
    once = hidden.grad.clone()  # type: ignore[union-attr]
    accelerator.backward(loss)
    torch.testing.assert_close(hidden.grad, 2 * once)


def test_a_second_derivative_is_refused(accelerator: Accelerator) -> None:
    head, hidden = nn.Linear(FEATURES, VOCABULARY), torch.randn(4, FEATURES, requires_grad=True)
    loss = accelerator.lm_loss(hidden, head, torch.arange(4), shift=False)
    with pytest.raises(StateError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
def test_the_surrounding_code_is_compiled_without_a_break(accelerator: Accelerator) -> None:
    head = nn.Linear(FEATURES, VOCABULARY)

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return accelerator.lm_loss(hidden.tanh(), head, labels, shift=True, slice_size=20) * 2

    hidden, labels = torch.randn(4, FEATURES, requires_grad=True), torch.arange(4)
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(hidden, labels)
    expected = loss_of(hidden, labels)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(gradients_of([hidden], compiled), gradients_of([hidden], expected))


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32(states: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    head, hidden, labels = nn.Linear(FEATURES, VOCABULARY), torch.randn(64, FEATURES), torch.arange(64) % 50
    loss = accelerator.lm_loss(hidden, head, labels, shift=False)
    with accelerator.autocast():
        logits = head(hidden)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy(logits.float(), labels), rtol=1e-6, atol=0)


def test_a_mean_in_a_window_of_counted_items_is_an_error(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(FEATURES, VOCABULARY))
    hidden, labels = torch.randn(4, FEATURES), torch.arange(4)
    with accelerator.accumulate(model, num_items=4):
        with torch.no_grad():
            accelerator.lm_loss(hidden, model, labels, shift=False)
        with pytest.raises(ConfigurationError, match='reduction="sum"'):
            accelerator.lm_loss(hidden, model, labels, shift=False)
    accelerator.lm_loss(hidden, model, labels, shift=False)


HEAD, HIDDEN, LABELS = nn.Linear(FEATURES, VOCABULARY), torch.zeros(4, FEATURES), torch.arange(4)
WRONG: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], str]] = {
    "no shift": ((HIDDEN, HEAD, LABELS), {"shift": None}, r"^shift=None: .* Pass shift=True"),
    "reduction": ((HIDDEN, HEAD, LABELS), {"reduction": "none"}, "^reduction='none'"),
    "shape": ((HIDDEN, HEAD, torch.arange(3)), {}, r"^labels=\[3\]: .*shape \[4, 16\]"),
    "label": ((HIDDEN, HEAD, torch.full((4,), 50)), {}, "^labels=50: the vocabulary has 50 entries"),
    "negative label": ((HIDDEN, HEAD, torch.full((4,), -1)), {}, "^labels=-1"),
    "label dtype": ((HIDDEN, HEAD, torch.rand(4)), {}, r"^labels=torch.float32"),
    "scalar": ((torch.zeros(FEATURES), HEAD, torch.tensor(1)), {}, r"hidden\[None\]"),
    "features": ((torch.zeros(4, 3), HEAD, LABELS), {}, r"^hidden=\[4, 3\]: .*\[50, 16\]"),
    "dtype": ((HIDDEN.double(), HEAD, LABELS), {}, r"^hidden=torch.float64"),
    "smoothing": ((HIDDEN, HEAD, LABELS), {"label_smoothing": 2}, "^label_smoothing=2"),
    "z-loss": ((HIDDEN, HEAD, LABELS), {"z_loss": -1}, "^z_loss=-1"),
    "scale": ((HIDDEN, HEAD, LABELS), {"scale": 0}, "^scale=0"),
    "cap": ((HIDDEN, HEAD, LABELS), {"soft_cap": 0}, "^soft_cap=0"),
    "slices": ((HIDDEN, HEAD, LABELS), {"slice_size": 0}, "^slice_size=0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_errors(accelerator: Accelerator, case: str) -> None:
    arguments, options, message = WRONG[case]
    with pytest.raises(ConfigurationError, match=message):
        accelerator.lm_loss(*arguments, **{"shift": False, **options})


class Mesh:
    """Mesh of 2 replicas and 4 ranks of sequences, of which only sizes and groups are read."""

    mesh_dim_names = ("dp_replicate", "sp", "tp")
    sizes = {"dp_replicate": 2, "sp": 4, "tp": 1}

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: self.sizes[name], get_group=lambda: name)


def test_the_factor_of_a_mean_depends_on_whether_gradients_of_sequences_are_averaged() -> None:
    averaged = ranks_of_sequences(Mesh(), replicas=8, size=8)
    assert averaged == (("sp",), 4)
    added = ranks_of_sequences(Mesh(), replicas=2, size=8)  # as DeepSpeed does
    assert added == (("sp",), 1)
    assert ranks_of_sequences(None, replicas=8, size=8) == ((), 1)
