"""transformers' Trainer on a tiny GPT-2: losses, evaluation, prediction, and a run that stops and goes on.

Usage: trainer.py FOLDER [NAME=JSON ...] with further training arguments.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from material import gpt2, rows, tell
from transformers import Trainer, TrainerCallback, TrainingArguments

STEPS, STOP = 8, 4


class StopEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == STOP


def build(folder: str, options: dict[str, Any], callbacks: tuple[Any, ...] = ()) -> Trainer:
    arguments = TrainingArguments(
        folder,
        per_device_eval_batch_size=4,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=STOP,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        **{"per_device_train_batch_size": 2, **options},
    )
    data = rows(75)
    return Trainer(
        gpt2(), arguments, train_dataset=data[:64], eval_dataset=data[64:], callbacks=list(callbacks)
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    folder, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    whole = build(os.path.join(folder, "whole"), options)
    whole.train()
    found: dict[str, Any] = {"losses": losses_of(whole), "evaluation": whole.evaluate()["eval_loss"]}
    predicted = whole.predict(rows(75)[64:]).predictions
    found["prediction"] = [list(predicted.shape), float(abs(predicted).sum())]
    build(os.path.join(folder, "halves"), options, (StopEarly(),)).train()
    second = build(os.path.join(folder, "halves"), options)
    second.train(resume_from_checkpoint=True)
    found["resumed"] = losses_of(second)
    if whole.is_world_process_zero():
        tell(found)


if __name__ == "__main__":
    main()
