"""Models of transformers train without logits as with them, in each layout and with adapters on the head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.losses import use_lm_loss

Run = Callable[..., list[Any]]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "head_dim": 8,
    "pad_token_id": 0,
}


def build(name: str, ties: bool, adapts: bool) -> Any:
    import transformers

    cap = {"final_logit_softcapping": 1.5} if name == "Gemma2" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **cap, tie_word_embeddings=ties)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if not adapts:
        return model
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )


def train(changes: bool, layout: str, name: str, ties: bool, adapts: bool) -> tuple[list[float], Any]:
    """Returns losses and weights of three steps, with logits or without."""
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module"
    )  # the logits are a view; they are not written to
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # of peft
    options: dict[str, Any] = {}
    if layout.startswith("sp"):
        options["parallelism_config"] = ParallelismConfig(sp_size=2, sp_backend="torch")
    elif layout == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=2)
    elif layout != "ddp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(layout[-1]), use_orig_params=True, auto_wrap_policy="transformer_based_wrap"
        )
    accelerator = Accelerator(cpu=True, **options)
    model = build(name, ties, adapts)
    if changes:
        use_lm_loss(model, slice_size=20)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(1, 97, (4, 10), generator=torch.Generator().manual_seed(0))
    if layout not in ("tp", "sp", "sp of items"):
        tokens = tokens.chunk(2)[accelerator.process_index]
    labels = tokens.masked_fill(torch.arange(10) < 4, -100)  # ranks of sequences have 1 and 5 of them
    counted = {"num_items_in_batch": (labels[:, 1:] != -100).sum()} if layout == "sp of items" else {}
    losses = []
    for _ in range(3):
        output = model(input_ids=tokens, labels=labels, **counted)
        assert (output.logits is None) == changes
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss.detach()))
    weights: dict[str, Tensor] = accelerator.get_state_dict(model)
    return losses, weights


@pytest.mark.parametrize(
    ("layout", "name", "ties", "adapts"),
    [
        ("ddp", "Gemma2", False, False),
        ("fsdp2", "Gemma2", True, False),
        ("tp", "Llama", True, False),
        pytest.param("tp", "Llama", False, True, marks=pytest.mark.slow),
        ("sp", "Llama", False, False),
        ("sp of items", "Llama", False, False),
        pytest.param("fsdp1", "Llama", False, False, marks=pytest.mark.slow),
        pytest.param("tp", "Llama", False, False, marks=pytest.mark.slow),
        pytest.param("ddp", "Llama", False, True, marks=pytest.mark.slow),
        pytest.param("fsdp2", "Llama", False, True, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_with_logits(run: Run, layout: str, name: str, ties: bool, adapts: bool) -> None:
    pytest.importorskip("peft" if adapts else "transformers")
    cases = [(changes, layout, name, ties, adapts) for changes in (False, True)]
    for (losses, weights), (others, changed) in run(call_for_each, train, cases, processes=2, timeout=180):
        assert others == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(changed, weights, rtol=1e-5, atol=1e-5)
