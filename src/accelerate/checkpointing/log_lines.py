"""Log lines of saved and loaded files, with the texts that programs search for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME

SAVED = {
    r"(?:pytorch_)?model(?:_\d+)?\.(?:bin|safetensors)": "Model weights saved in {path}",
    rf"{FSDP_MODEL_NAME}_\d+": "Model weights saved in {path}",
    r"optimizer(?:_\d+)?\.bin": "Optimizer state saved in {path}",
    rf"{OPTIMIZER_NAME}_\d+": "Optimizer state saved in {path}",
    r"scheduler(?:_\d+)?\.bin": "Scheduler state saved in {path}",
    r"sampler(?:_(\d+))?\.bin": "Sampler state for dataloader {number} saved in {path}",
    r"scaler\.pt": "Gradient scaler state saved in {path}",
    r"random_states_\d+\.pkl": "Random states saved in {path}",
    r"custom_checkpoint_(\d+)\.pkl": "Saving the state of {kind} to {path}",
}
"""Line for each file, or folder of shards, by the pattern of its name, in the order of the lines."""
LOADED = ("model weights", "optimizer states", "scheduler states", "dataloader sampler states")


def saved_lines(target: Path, names: Sequence[str], custom: Sequence[str]) -> list[str]:
    """Returns the lines for the files that a rank has saved.

    Args:
        target: Folder of the checkpoint.
        names: Paths of the files in it.
        custom: Classes of the objects of the user.
    """
    tops = list(dict.fromkeys(name.partition("/")[0] for name in names))
    lines = []
    for pattern, text in SAVED.items():
        for top in tops:
            if match := re.fullmatch(pattern, top):
                number = int(match[1] or 0) if match.re.groups else 0
                kind = custom[number] if number < len(custom) else "an object"
                lines.append(text.format(path=target / top, number=number, kind=kind))
    return lines


def loaded_lines(folder: Path, has_scaler: bool, custom: Sequence[str]) -> list[str]:
    """Returns the lines for a checkpoint that was loaded."""
    return [
        *(f"All {objects} loaded successfully" for objects in LOADED),
        *(["GradScaler state loaded successfully"] if has_scaler else []),
        "All random states loaded successfully",
        f"Loading in {len(custom)} custom states",
        *(
            f"Loading the state of {kind} from {folder / f'custom_checkpoint_{index}.pkl'}"
            for index, kind in enumerate(custom)
        ),
    ]
