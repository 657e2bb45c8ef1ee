"""Models of transformers are split into stages without a change, and train as on one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, PreparationError, is_torch_version
from accelerate.utils import PipelineConfig

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 2}
GROUPED = {**SMALL, **HEADS, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, **NO_DROPOUT}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "bert": ("BertConfig", "BertForMaskedLM", {**SMALL, **HEADS, **BERT_DROPOUT}),
    "opt": (  # registers its last norm before its layers
        "OPTConfig",
        "OPTForCausalLM",
        {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 4, **HEADS}
        | {"word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "dropout": 0.0, "decoder_start_token_id": 0}
        | {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    ),
    "gemma3n": (  # each layer has inputs of its own, computed before the first one
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {**GROUPED, "head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
        | {"layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 0, "altup_num_inputs": 2}
        | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 3, "num_heads": 2, "d_kv": 8}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
}


def make(name: str) -> nn.Module:
    config, model, options = MODELS[name]
    torch.manual_seed(0)
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return built


def compare(name: str, schedule: str) -> None:
    config = PipelineConfig(schedule=schedule, microbatches=4)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    model = make(name)
    alone = copy.deepcopy(model)
    model = accelerator.prepare(model)
    for length in (6, 5):
        ids = torch.randint(64, (8, length), generator=torch.Generator().manual_seed(length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        expected = alone(**batch).loss
        expected.backward()
        loss = accelerator.forward_backward(model, batch)
        torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=1e-6)
    own = dict(model.named_parameters())
    assert 0 < len(own) < len(dict(alone.named_parameters()))
    for key, parameter in alone.named_parameters(remove_duplicate=False):
        if key in own and parameter.grad is not None:
            torch.testing.assert_close(own[key].grad, parameter.grad, atol=1e-6, rtol=1e-5, msg=key)
    model.eval()
    alone.eval()
    with torch.no_grad():
        found = model(**batch).logits
        torch.testing.assert_close(found, alone(**batch).logits, atol=1e-6, rtol=1e-5)


def refuse_shared_tensors() -> None:
    config = PipelineConfig(schedule="zbvzerobubble", microbatches=4)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    model = accelerator.prepare(make("t5"))
    ids = torch.zeros(8, 4, dtype=torch.long)
    with pytest.raises((PreparationError, RuntimeError)) as caught:
        accelerator.forward_backward(model, {"input_ids": ids, "labels": ids})
    is_refused = "Use the schedule 1f1b" in str(caught.value)
    assert is_refused or not isinstance(caught.value, PreparationError)  # the other rank has left
    if is_refused:
        raise ValueError("refused")


@pytest.mark.slow
def test_layers_that_share_tensors_need_whole_backward_passes(run: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="ValueError: refused"):
        run(refuse_shared_tensors, processes=2, timeout=60)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama", "1f1b"),
        *(
            pytest.param(name, schedule, marks=pytest.mark.slow)
            for name in MODELS
            for schedule in ("1f1b", "zbvzerobubble")
            if schedule == "1f1b" or name not in ("t5", "gemma3n")
        ),
    ],
)
def test_gradients_are_those_of_one_process(run: Run, name: str, schedule: str) -> None:
    run(compare, name, schedule, processes=2, timeout=120)


def compare_ignored_labels(name: str) -> None:
    config = PipelineConfig(microbatches=4)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    alone = make(name)
    model = accelerator.prepare(make(name))
    ids = torch.randint(3, 64, (8, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 0] = labels[2, :3] = labels[5, 4:] = labels[6:] = -100  # no label in the last micro-batch
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": labels})
    first = 1 if name == "llama" else 0
    for extra in ({}, {"num_items_in_batch": int((labels[:, first:] != -100).sum())}):
        if extra and name == "bert":
            continue  # ignores it
        expected = alone(**batch, **extra).loss
        expected.backward()
        loss = accelerator.forward_backward(model, transformers.BatchEncoding({**batch, **extra}))
        torch.testing.assert_close(loss, expected.detach())
    gradients = {key: each.grad for key, each in alone.named_parameters(remove_duplicate=False)}
    for key, parameter in model.named_parameters():
        if gradients[key] is not None:
            torch.testing.assert_close(parameter.grad, gradients[key], msg=key)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).loss, alone.eval()(**batch).loss)
    with pytest.raises(ConfigurationError, match="Pass use_cache=False"):
        model(**batch, use_cache=True)


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_losses_over_labels_are_those_of_one_process(run: Run, name: str) -> None:
    run(compare_ignored_labels, name, processes=2, timeout=60)


def train_adapters(is_wrapped_by_size: bool) -> list[float]:
    """Returns the losses of two steps in a pipeline with shards, and those of one process."""
    import peft

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft reads it
    wrap = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100} if is_wrapped_by_size else {}
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrap),
        parallelism_config=ParallelismConfig(
            pp_size=2, dp_shard_size=2, pp_handler=PipelineConfig(microbatches=2)
        ),
    )
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    alone = peft.get_peft_model(make("llama"), config)
    model = copy.deepcopy(alone)
    losses = []
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    ids = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        batch = {"input_ids": ids, "labels": ids.clone()}
        losses.append(float(accelerator.forward_backward(model, batch)))
        optimizer.step()
        optimizer.zero_grad()
        loss = alone(**batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        reference.step()
        reference.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("is_wrapped_by_size", [True, False])
def test_adapters_train_in_a_pipeline_with_shards(run: Run, is_wrapped_by_size: bool) -> None:
    pytest.importorskip("peft")
    for first, expected_first, second, expected_second in run(
        train_adapters, is_wrapped_by_size, processes=4, timeout=90
    ):
        assert first == pytest.approx(expected_first, abs=1e-6)
        assert second == pytest.approx(expected_second, abs=1e-6)
        assert first != pytest.approx(second, abs=1e-3)
