"""peft: LoRA adapters trained in a plain loop, saved and read again, and over a base that is offloaded.

Usage: lora.py FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from material import llama, rows, tell
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader

from accelerate import Accelerator, dispatch_model

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}


def train(model: Any, accelerator: Accelerator) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(rows(32), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def offloaded(folder: str) -> list[float]:
    """Adapters on a base with layers offloaded to the disk, read from a folder."""
    base = llama()
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{number}": "disk" if number else "cpu" for number in range(3)}
    base = dispatch_model(base, {**places, **layers}, offload_dir=f"{folder}/offload", main_device="cpu")
    model = PeftModel.from_pretrained(base, f"{folder}/adapter", offload_dir=f"{folder}/offload")
    with torch.no_grad():
        batch = {name: value[None] for name, value in rows(1)[0].items()}
        return [model(**batch).loss.item(), model.merge_and_unload()(**batch).loss.item()]


def main() -> None:
    folder = sys.argv[1]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model = get_peft_model(llama(), LoraConfig(**CONFIG))
    found: dict[str, Any] = {"losses": train(model, accelerator)}
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/adapter")
        again = PeftModel.from_pretrained(llama(), f"{folder}/adapter")
        batch = {name: value[None] for name, value in rows(1)[0].items()}
        with torch.no_grad():
            found["again"] = again(**batch).loss.item()
        found["offloaded"] = offloaded(folder)
        tell(found)
    accelerator.end_training()


if __name__ == "__main__":
    main()
