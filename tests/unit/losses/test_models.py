"""Models of transformers train as before, without logits, and return logits wherever they may be read."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import Accelerator
from accelerate.base import PreparationError, StateError
from accelerate.losses import use_lm_loss

transformers = pytest.importorskip("transformers")
VOCABULARY = 97
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, "attn_pdrop": 0, "embd_pdrop": 0}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Qwen2": SIZES,
    "GPT2": {**GPT2, "resid_pdrop": 0},
    "Gemma2": {**SIZES, "head_dim": 8, "final_logit_softcapping": 1.5},
    "Granite": {**SIZES, "logits_scaling": 3.0},
    "Cohere": {**SIZES, "logit_scale": 0.25},
    "Mixtral": {**SIZES, "num_local_experts": 2, "output_router_logits": True},
}
TOKENS = torch.randint(1, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill(torch.arange(10) == 3, -100)


def build(name: str, ties: bool = False) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], tie_word_embeddings=ties)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def step(model: Any, **inputs: Any) -> tuple[Any, list[Tensor]]:
    model.zero_grad()
    output = model(input_ids=TOKENS, labels=LABELS, **inputs)
    output[0].backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model: Any, changed: Any, **inputs: Any) -> Any:
    (expected, gradients), (found, others) = step(model, **inputs), step(changed, **inputs)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(others, gradients, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model(name: str, ties: bool) -> None:
    model, changed = build(name, ties), use_lm_loss(build(name, ties), slice_size=20)
    output = compare(model, changed)
    assert output.logits is None
    assert "logits" not in output
    compare(model, changed, num_items_in_batch=torch.tensor(7))
    assert any(value is None for value in compare(model, changed, return_dict=False))
    shifted = nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    compare(model, changed, shift_labels=shifted)


def test_logits_are_whole_outside_of_training() -> None:
    model, changed = build("Llama").eval(), use_lm_loss(build("Llama"))
    expected = model(input_ids=TOKENS).logits
    torch.testing.assert_close(changed(input_ids=TOKENS).logits, expected)
    with torch.no_grad():
        torch.testing.assert_close(changed(input_ids=TOKENS, labels=LABELS).logits, expected)
    changed.eval()
    output = changed(input_ids=TOKENS, labels=LABELS)
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, model(input_ids=TOKENS, labels=LABELS).loss)
    texts = [each.generate(TOKENS, max_new_tokens=3, do_sample=False) for each in (model, changed)]
    assert torch.equal(*texts)


def test_signature_and_names_do_not_change() -> None:
    model = build("Llama")
    signature, names = inspect.signature(model.forward), list(model.state_dict())
    assert use_lm_loss(model) is model
    assert inspect.signature(model.forward) == signature
    assert list(model.state_dict()) == names
    assert use_lm_loss(model).forward is model.forward


def test_copies_train_their_own_weights() -> None:
    model, changed = build("Llama"), use_lm_loss(build("Llama"))
    for copied in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        step(changed)
        changed.zero_grad()
        assert compare(model, copied).logits is None
        assert all(parameter.grad is None for parameter in changed.parameters())


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_prepared_model_returns_no_logits(states: Any, mixed_precision: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    model, changed = accelerator.prepare(build("Gemma2"), use_lm_loss(build("Gemma2")))
    (expected, _), (found, _) = step(model), step(changed)
    assert found.logits is None
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(
        found.loss, expected.loss, rtol=1e-5 if mixed_precision == "no" else 1e-2, atol=0
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("order", ["before", "after", "outside"])
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_a_peft_model_trains_its_adapters(order: str, targets: list[str]) -> None:
    peft = pytest.importorskip("peft")

    def adapted(changes: bool) -> Any:
        model = build("Llama")
        if changes and order == "before":
            use_lm_loss(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        )
        if changes and order != "before":
            use_lm_loss(model if order == "outside" else model.get_base_model())
        return model

    assert compare(adapted(False), adapted(True)).logits is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_trains_as_before(fullgraph: bool) -> None:
    model, changed = build("Llama"), use_lm_loss(build("Llama"))
    compiled = torch.compile(changed, backend="aot_eager", fullgraph=fullgraph)
    assert compare(model, compiled).logits is None


def trained(folder: Path, changes: bool) -> tuple[list[float], list[Tensor]]:
    """Returns losses of a Trainer and the weights after it, with windows of several batches."""
    model = build("Llama")
    if changes:
        use_lm_loss(model)
    rows = torch.randint(1, VOCABULARY, (8, 10), generator=torch.Generator().manual_seed(3))
    dataset = [{"input_ids": row, "labels": row.masked_fill(row > 60, -100)} for row in rows]
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=dataset, eval_dataset=dataset, compute_metrics=_accuracy
    )
    trainer.train()
    logs = trainer.state.log_history
    losses = [log[key] for log in logs for key in ("loss", "eval_loss", "eval_accuracy") if key in log]
    return losses, list(model.parameters())


def _accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def test_a_trainer_trains_and_evaluates_as_before(states: Any, tmp_path: Path) -> None:
    losses, weights = trained(tmp_path, False)
    found, others = trained(tmp_path, True)
    assert len(found) == 6
    assert found == pytest.approx(losses, abs=1e-5)
    # Adam divides rounding errors by small gradients. Another loss would change weights by the learning rate.
    torch.testing.assert_close(others, weights, rtol=1e-5, atol=1e-3)


class Indexing(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Model whose forward reads its logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.model(input_ids)[0])
        return self.loss_function(logits[:, :5], labels, VOCABULARY), logits


class Ignoring(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Model whose forward does not call its loss function."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return self.model(input_ids)[0].mean(), self.lm_head(self.model(input_ids)[0])


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [(Indexing, PreparationError, "indexes logits"), (Ignoring, StateError, "has not passed its logits")],
)
def test_a_forward_that_needs_logits_is_an_error(kind: Any, error: Any, message: str) -> None:
    model = use_lm_loss(kind(transformers.LlamaConfig(**SIZES)).train())
    with pytest.raises(error, match=message):
        model(input_ids=TOKENS, labels=LABELS)
    assert isinstance(model.lm_head, nn.Linear)


def test_other_losses_and_models_are_errors() -> None:
    sizes = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
    with pytest.raises(PreparationError, match="BertForMaskedLM does not compute the loss of causal"):
        use_lm_loss(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    with pytest.raises(PreparationError, match="has no head among its submodules"):
        use_lm_loss(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)))
    with pytest.raises(PreparationError, match="Linear does not compute"):
        use_lm_loss(nn.Linear(2, 2))
