"""Models that transformers shards as it loads them train as on one process, in a loop and in its Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from accelerate import Accelerator

pytestmark = pytest.mark.slow
Run = Callable[..., list[Any]]
BATCH = 8
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def save_checkpoint(name: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    more = EXPERTS if "Moe" in name else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)


def load(folder: Path, sizes: dict[str, Any]) -> Any:
    import transformers

    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the output is a view that is not written to
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {}
    if sizes:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.train()


def tokens() -> torch.Tensor:
    return torch.randint(3, 64, (6 * BATCH, 12), generator=torch.Generator().manual_seed(1))


def add_adapters(model: Any) -> Any:
    import peft

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted


def train_in_loop(folder: Path, sizes: dict[str, Any], adapters: bool) -> list[tuple[float, float]]:
    accelerator = Accelerator(cpu=True, split_batches=True)
    model = add_adapters(load(folder, sizes)) if adapters else load(folder, sizes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(tokens(), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for ids in loader:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(accelerator.reduce(loss.detach(), "mean")), float(norm)))
    return found


def train_by_trainer(folder: Path, sizes: dict[str, Any], adapters: bool) -> list[tuple[float, float]]:
    import transformers

    model = add_adapters(load(folder, sizes)) if adapters else load(folder, sizes)
    batch = BATCH // (sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1))
    arguments = transformers.TrainingArguments(
        str(folder / "run"),
        use_cpu=True,
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens()])
    trainer.train()
    history = trainer.state.log_history
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


CASES = [
    ("Llama", {"tp_size": 2}, False),
    ("Llama", {"tp_plan": "auto"}, False),
    ("Llama", {"fsdp_size": 2}, True),
    ("Llama", {"tp_size": 2}, True),
    ("Llama", {"tp_size": 2, "fsdp_size": 2}, False),
    ("Llama", {"dp_replicate_size": 2, "fsdp_size": 2}, False),
    ("Qwen3Moe", {"tp_size": 2, "ep_size": 2}, False),
    ("Qwen3Moe", {"fsdp_size": 2, "ep_size": 2}, True),
    ("Qwen3Moe", {"fsdp_size": 4, "ep_size": 2}, False),
    ("Qwen3Moe", {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}, False),
    ("Qwen3Moe", {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}, False),
]


@pytest.mark.parametrize("train", [train_in_loop, train_by_trainer])
@pytest.mark.parametrize(("name", "sizes", "adapters"), CASES)
def test_training_is_that_of_one_process(
    run: Run, tmp_path: Path, train: Any, name: str, sizes: dict[str, Any], adapters: bool
) -> None:
    pytest.importorskip("peft")
    save_checkpoint(name, tmp_path)
    (expected,) = run(train, tmp_path, {}, adapters, processes=1, timeout=180)
    total = max(2, sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1))
    losses, norms = zip(*expected, strict=True)
    for found in run(train, tmp_path, sizes, adapters, processes=total, timeout=240):
        assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-4)
        assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-3)
