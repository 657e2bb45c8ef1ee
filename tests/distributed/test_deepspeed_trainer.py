"""transformers' Trainer trains by real DeepSpeed engines, in two processes on the CPU.

Needs the packages deepspeed (0.19.8) and transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.utils import is_deepspeed_available, is_transformers_available, set_seed

pytestmark = pytest.mark.slow
Run = Callable[..., list[Any]]
ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}


class Texts(torch.utils.data.Dataset[Any]):
    """Random texts of eight tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.tokens[index]
        return {"input_ids": text, "labels": text, "position_ids": torch.arange(len(text))}


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=4, attn_implementation="sdpa", **sizes)
    set_seed(0)
    return LlamaForCausalLM(config)


def train_by_trainer(folder: str, stage: int) -> tuple[list[Any], list[Any]]:
    from transformers import Trainer, TrainingArguments

    warnings.simplefilter("ignore")
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "betas": "auto",
                "eps": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
            },
        },
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
    }

    def arguments(**more: Any) -> TrainingArguments:
        return TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            seed=7,
            **more,
        )

    def logged(trainer: Any) -> list[Any]:
        return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]

    trainer = Trainer(tiny_llama(), arguments(deepspeed=config), train_dataset=Texts())
    trainer.train()
    trainer.save_model(f"{folder}/last")
    again = Trainer(tiny_llama(), arguments(deepspeed=config), train_dataset=Texts())
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return logged(trainer), logged(again)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_of_transformers(run: Run, tmp_path: Path, stage: int) -> None:
    if not (is_deepspeed_available() and is_transformers_available()):
        pytest.skip("deepspeed and transformers are not both installed")
    whole, resumed = run(train_by_trainer, str(tmp_path), stage, env=ENVIRONMENT, timeout=300)[0]
    assert len(whole) == 4
    assert all(norm > 0 for _, norm in whole)
    for row, expected in zip(resumed[-2:], whole[-2:], strict=True):
        assert row == pytest.approx(expected, abs=1e-3)
    assert (tmp_path / "last" / "model.safetensors").is_file()
