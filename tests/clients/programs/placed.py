"""transformers' models with a device map: on the CPU, chosen by itself, and with layers on the disk.

Usage: placed.py FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from material import llama, rows, tell
from transformers import LlamaForCausalLM

MAPS: dict[str, Any] = {
    "whole": {"": "cpu"},
    "auto": "auto",
    "balanced": "balanced",
    "disk": {
        **dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"),
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    },
}


def main() -> None:
    folder = sys.argv[1]
    llama().save_pretrained(f"{folder}/model", max_shard_size="20KB")
    batch = {name: value[None] for name, value in rows(1)[0].items()}
    found = {}
    for name, places in MAPS.items():
        model = LlamaForCausalLM.from_pretrained(
            f"{folder}/model", device_map=places, offload_folder=f"{folder}/{name}", dtype=torch.float32
        )
        with torch.no_grad():
            loss = model(**batch).loss.item()
            words = model.generate(batch["input_ids"][:, :8], max_new_tokens=6, do_sample=False)
        found[name] = [loss, words[0].tolist(), str(getattr(model, "hf_device_map", None))]
    tell(found)


if __name__ == "__main__":
    main()
