"""Options of a verified run, which the command passes to the processes of the script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "ACCELERATE_VERIFY"
"""Variable with the options as JSON."""
ENTRY = Path(__file__).with_name("entry.py")
"""Program that the launcher starts in place of the script."""

SEED = 2024
"""Seed at the beginning of the script, and of the order of samples."""
RANK_FILE = "rank-{}.jsonl"
WEIGHTS_FILE = "{}-{}.safetensors"
"""File of the weights of a model "before" the first step or "after" the last one, and its number."""

INPUT = "input "
"""Prefix of the names of inputs of models among those of outputs."""
BUFFER = "buffer "
"""Prefix of the names of buffers that are not in the saved weights."""


@dataclass(frozen=True)
class Options:
    """Options of one of the two runs.

    Attributes:
        steps: Number of optimizer steps after which the run stops.
        factor: Number by which the batch sizes of loaders are multiplied, so that one step has as many
            samples as in the other run.
        is_reference: Whether plugins that the script passes to `Accelerator` are left out.
        keeps_dropout: Whether dropout is applied.
        traced_step: Step in which the outputs of modules are recorded, from 1, or 0 for none.
        traced_optimizer: Number of the optimizer that takes this step.
        initial: Folder of the run whose initial weights this run begins with, or "".
    """

    folder: str
    steps: int
    factor: int = 1
    is_reference: bool = False
    keeps_dropout: bool = False
    traced_step: int = 0
    traced_optimizer: int = 0
    initial: str = ""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Options:
        return cls(**json.loads(variables[VARIABLE]))

    def as_variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}
