"""Fine-tune a language model of transformers to answer questions: the help texts of Python.

    accelerate launch --cpu --num_processes 2 examples/by_task/language_model.py

A sample is the name of a topic and a paragraph about it, and the loss counts the bytes of the paragraph only.
Paragraphs have different lengths, so the loss is a sum, and `windows` divides the gradients by the number of
bytes of all ranks: they equal those of one process with the joined batch. The model is built from a
configuration; `AutoModelForCausalLM.from_pretrained` begins with trained weights. Needs transformers.
"""

import argparse
from functools import partial
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator
from accelerate.utils import set_seed

IGNORED = -100
pad = partial(pad_sequence, batch_first=True)


def build_samples() -> list[tuple[str, str]]:
    """Returns pairs of a prompt and an answer."""
    paragraphs = [(topic, part) for topic, text in sorted(topics.items()) for part in text.split("\n\n")]
    return [(f"{topic}: ", " ".join(part.split())) for topic, part in paragraphs if 40 <= len(part) <= 160]


def collate(samples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Returns padded bytes, and labels that leave out prompts and padding."""
    tokens = [torch.tensor(list((prompt + answer + "\n").encode())) for prompt, answer in samples]
    labels = [row.clone() for row in tokens]
    for row, (prompt, _) in zip(labels, samples, strict=True):
        row[: len(prompt.encode())] = IGNORED
    mask = [torch.ones_like(row) for row in tokens]
    return {
        "input_ids": pad(tokens),
        "attention_mask": pad(mask),
        "labels": pad(labels, padding_value=IGNORED),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model.")
    parser.add_argument("--num_epochs", type=int, default=2)
    arguments = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(build_samples(), batch_size=8, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(arguments.num_epochs):
        loss_sum = num_bytes = torch.zeros((), device=accelerator.device)
        for window in accelerator.windows(loader, num_items=lambda batch: (batch["labels"] != IGNORED).sum()):
            for batch in window:
                labels = batch.pop("labels")[:, 1:]
                logits = model(**batch).logits[:, :-1]
                loss = cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                accelerator.backward(loss)
                loss_sum, num_bytes = loss_sum + loss.detach(), num_bytes + (labels != IGNORED).sum()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss_sum, num_bytes = accelerator.reduce((loss_sum, num_bytes))
        accelerator.print(f"epoch {epoch}: loss {loss_sum / num_bytes:.3f}")


if __name__ == "__main__":
    main()
