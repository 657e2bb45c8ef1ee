"""transformers' Trainer on a tiny GPT-2: losses, evaluation, prediction, and a run that stops and resumes.

Usage: trainer.py FOLDER [NAME=JSON ...] with further training arguments; with `device_map=JSON` for a model
that is read from files so, and with `streamed=true` for rows from a dataset that is streamed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from material import gpt2, rows, tell
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

STEPS, STOP = 8, 4


class StopEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == STOP


def model_of(folder: str, device_map: Any) -> Any:
    if device_map is None:
        return gpt2()
    from safetensors.torch import save_model

    own, model = f"{folder}/model-{os.environ.get('RANK', '0')}", gpt2()
    model.config.save_pretrained(own)
    save_model(model, f"{own}/model.safetensors", {"format": "pt"})
    return GPT2LMHeadModel.from_pretrained(own, device_map=device_map, dtype="float32")


def rows_of(count: int, streamed: bool) -> Any:
    if not streamed:
        return rows(count)
    from datasets import Dataset

    listed = [{name: value.tolist() for name, value in row.items()} for row in rows(count)]
    return Dataset.from_list(listed).to_iterable_dataset(num_shards=4).shuffle(seed=2, buffer_size=16)


def build(folder: str, options: dict[str, Any], callbacks: tuple[Any, ...] = ()) -> Trainer:
    options = dict(options)
    device_map, streamed = options.pop("device_map", None), options.pop("streamed", False)
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
    return Trainer(
        model_of(folder, device_map),
        arguments,
        train_dataset=rows_of(64, streamed),
        eval_dataset=rows(76)[64:],
        callbacks=list(callbacks),
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    folder, *pairs = sys.argv[1:]
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    whole = build(os.path.join(folder, "whole"), options)
    whole.train()
    found: dict[str, Any] = {"losses": losses_of(whole), "evaluation": whole.evaluate()["eval_loss"]}
    found["with a short end"] = whole.evaluate(rows(75)[64:])["eval_loss"]
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
