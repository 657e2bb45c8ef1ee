"""Heads are linear layers, tied embeddings and weights, and LoRA layers of peft, and others are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from accelerate.base import ConfigurationError, PreparationError
from accelerate.losses import lm_loss

FEATURES, VOCABULARY = 16, 50
LABELS = torch.arange(6)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, hidden: Tensor) -> Any:
        return self.lm_head(hidden)


def compare(head: Any, logits: Any, trained: list[Tensor]) -> None:
    """Compares loss and gradients for a head with those of its logits."""
    hidden = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(2)  # of dropout
    expected = cross_entropy(logits(hidden), LABELS)
    torch.manual_seed(2)
    loss, _ = lm_loss(hidden, head, LABELS, shift=False, slice_size=9)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [hidden, *trained])
    torch.testing.assert_close(found, torch.autograd.grad(expected, [hidden, *trained]))


def test_a_tied_embedding_and_its_weight_are_heads() -> None:
    embedding = nn.Embedding(VOCABULARY, FEATURES)
    for head in (embedding, embedding.weight):
        compare(head, lambda hidden: linear(hidden, embedding.weight), [embedding.weight])


def test_a_parametrized_layer_is_a_head() -> None:
    head = weight_norm(nn.Linear(FEATURES, VOCABULARY))
    compare(head, head, list(head.parameters()))


@pytest.mark.parametrize("head", [Doubled(FEATURES, VOCABULARY), nn.Sequential(nn.Linear(FEATURES, 3)), 3])
def test_other_heads_are_errors(head: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^head=(.|\n)*: its logits are not a matrix product"):
        lm_loss(torch.zeros(6, FEATURES), head, LABELS, shift=False)


def test_a_tensor_that_is_no_matrix_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"shape \[16\]"):
        lm_loss(torch.zeros(6, FEATURES), torch.zeros(FEATURES), LABELS, shift=False)


HOOKS: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "forward": (lambda head: head.register_forward_hook(lambda module, args, output: output.tanh()), "tests"),
    "backward": (
        lambda head: head.register_full_backward_hook(lambda module, given, by: (2 * given[0],)),
        "tests",
    ),
    "before backward": (lambda head: head.register_full_backward_pre_hook(lambda module, by: by), "tests"),
    "pruned": (lambda head: prune.l1_unstructured(head, "weight", 0.5), "torch.nn.utils.prune"),
    "normalized": (nn.utils.spectral_norm, "torch.nn.utils.spectral_norm"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_would_not_run_is_an_error(name: str) -> None:
    head = nn.Linear(FEATURES, VOCABULARY)
    register, module = HOOKS[name]
    register(head)
    with pytest.raises(ConfigurationError, match=f"a hook of {module}"):
        lm_loss(torch.zeros(6, FEATURES), head, LABELS, shift=False)


def test_a_weight_that_zero_3_shards_is_an_error() -> None:
    head = nn.Linear(8, 16)
    setattr(head.weight, "ds_id", 0)  # noqa: B010, as DeepSpeed marks it
    for given in (head, head.weight):
        with pytest.raises(PreparationError, match="ZeRO 3 shards the weights of the head"):
            lm_loss(torch.zeros(6, 8), given, LABELS, shift=False)


def test_a_quantized_weight_is_an_error() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    head = nn.Linear(FEATURES, VOCABULARY)
    quantization.quantize_(head, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ConfigurationError, match="such as a quantized one"):
        lm_loss(torch.zeros(6, FEATURES), head, LABELS, shift=False)


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


@pytest.mark.parametrize("bias", [False, True])
def test_lora_on_the_head_trains_its_adapters(peft: Any, bias: bool) -> None:
    config = peft.LoraConfig(r=3, target_modules=["lm_head"], lora_dropout=0.5, lora_bias=bias)
    model = peft.get_peft_model(Model(), config).train()
    head = model.base_model.model.lm_head
    nn.init.normal_(head.lora_B["default"].weight)
    compare(head, head, [p for p in model.parameters() if p.requires_grad])
    model.disable_adapter_layers()
    compare(head, head, [])
    model.enable_adapter_layers()
    model.eval()
    model.merge_adapter()
    compare(head, head, [])
    model.disable_adapter_layers()
    compare(head, head, [])
    head.register_forward_hook(lambda module, args, output: output.tanh())
    with pytest.raises(ConfigurationError, match="a hook of tests"):
        lm_loss(torch.zeros(6, FEATURES), head, LABELS, shift=False)


def test_a_saved_head_of_peft_trains_its_copy(peft: Any) -> None:
    class Net(Model):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(FEATURES, FEATURES)

    model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["up"], modules_to_save=["lm_head"]))
    head = model.base_model.model.lm_head
    compare(head, head, list(head.modules_to_save["default"].parameters()))


@pytest.mark.parametrize("kind", ["DoRA", "embedding"])
def test_other_adapters_are_errors(peft: Any, kind: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Embedding(VOCABULARY, FEATURES)

    model = Model() if kind == "DoRA" else Tied()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], use_dora=kind == "DoRA"))
    with pytest.raises(ConfigurationError, match="DoRA" if kind == "DoRA" else "not the LoRA of a linear"):
        lm_loss(torch.zeros(6, FEATURES), model.base_model.model.lm_head, LABELS, shift=False)
