"""trl: supervised fine-tuning and direct preference optimization of a tiny Llama.

Usage: fine_tuning.py FOLDER [SIZE], the batch of each process, otherwise 2.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from datasets import Dataset
from material import llama, tell, text, tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

COMMON = {
    "max_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "seed": 3,
}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def pieces(count: int, size: int) -> list[str]:
    whole = text(count * size)
    return [whole[start : start + size] for start in range(0, count * size, size)]


def main() -> None:
    folder, *sizes = sys.argv[1:]
    common = {**COMMON, "per_device_train_batch_size": int(sizes[0]) if sizes else 2}
    words = tokenizer()
    taught = SFTTrainer(
        llama(),
        SFTConfig(os.path.join(folder, "sft"), max_length=48, **common),
        train_dataset=Dataset.from_dict({"text": pieces(32, 40)}),
        processing_class=words,
    )
    taught.train()
    parts = pieces(48, 20)
    pairs = {"prompt": parts[:16], "chosen": parts[16:32], "rejected": parts[32:]}
    preferred = DPOTrainer(
        llama(),
        ref_model=llama(),
        args=DPOConfig(os.path.join(folder, "dpo"), max_length=64, **common),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=words,
    )
    preferred.train()
    if preferred.accelerator.is_main_process:
        tell({"taught": losses_of(taught), "preferred": losses_of(preferred)})


if __name__ == "__main__":
    main()
