"""The lines about a save or a load, in the words that programs and people look for in logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from accelerate.checkpointing.groups import OPTIMIZER
from accelerate.checkpointing.sharded import FOLDERS, MODEL

SAVED = {
    r"(?:pytorch_)?model(?:_\d+)?\.(?:bin|safetensors)": "Model weights saved in {path}",
    rf"{FOLDERS[MODEL]}_\d+": "Model weights saved in {path}",
    r"optimizer(?:_\d+)?\.bin": "Optimizer state saved in {path}",
    rf"{FOLDERS[OPTIMIZER]}_\d+": "Optimizer state saved in {path}",
    r"scheduler(?:_\d+)?\.bin": "Scheduler state saved in {path}",
    r"sampler(?:_(\d+))?\.bin": "Sampler state for dataloader {number} saved in {path}",
    r"scaler\.pt": "Gradient scaler state saved in {path}",
    r"random_states_\d+\.pkl": "Random states saved in {path}",
    r"custom_checkpoint_(\d+)\.pkl": "Saving the state of {kind} to {path}",
}
"""Names of files, or of folders of shards -> the line about one of them, in the order of the lines."""

LOADED = ("model weights", "optimizer states", "scheduler states", "dataloader sampler states")


def saved_lines(target: Path, names: Sequence[str], custom: Sequence[str]) -> list[str]:
    """Return the lines about what one rank has saved.

    Args:
        target: the checkpoint.
        names: its files that this rank has written.
        custom: types of the user's own objects.
    """
    tops = list(dict.fromkeys(name.partition("/")[0] for name in names))
    return [
        _spell(text, match, target / top, custom)
        for pattern, text in SAVED.items()
        for top in tops
        if (match := re.fullmatch(pattern, top))
    ]


def _spell(text: str, match: re.Match[str], path: Path, custom: Sequence[str]) -> str:
    number = int(match[1] or 0) if match.re.groups else 0
    kind = custom[number] if number < len(custom) else "an object"
    return text.format(path=path, number=number, kind=kind)


def loaded_lines(folder: Path, has_scaler: bool, custom: Sequence[str]) -> list[str]:
    """Return the lines about what was loaded.

    Args:
        folder: the checkpoint.
        has_scaler: whether the run scales its gradients.
        custom: types of the user's own objects.
    """
    return [
        *(f"All {what} loaded successfully" for what in LOADED),
        *(["GradScaler state loaded successfully"] if has_scaler else []),
        "All random states loaded successfully",
        f"Loading in {len(custom)} custom states",
        *(
            f"Loading the state of {kind} from {folder / f'custom_checkpoint_{index}.pkl'}"
            for index, kind in enumerate(custom)
        ),
    ]
