"""The programs of client libraries, and the ways in which they are run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
MARK = "FOUND "


@dataclass(frozen=True)
class Case:
    """One program in one way.

    Attributes:
        program: file name without its ending.
        packages: what it imports besides torch.
        arguments: after the folder.
        processes: how many.
    """

    program: str
    packages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    processes: int = 1


TRAINER = ("transformers",)
WHOLE = ("split_batches=false",)  # the original interface takes the argument, and does not heed it
BEST = ('eval_strategy="steps"', "eval_steps=4", "load_best_model_at_end=true")


def sharded(version: int, **more: Any) -> tuple[str, ...]:
    """Return the Trainer's arguments for FSDP."""
    settings = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "fsdp_version": version, **more}
    return 'fsdp="full_shard auto_wrap"', f"fsdp_config={json.dumps(settings)}"


CASES: dict[str, Case] = {
    "Trainer": Case("trainer", TRAINER),
    "Trainer, two processes": Case("trainer", TRAINER, processes=2),
    "Trainer, accumulating": Case("trainer", TRAINER, ("gradient_accumulation_steps=2",)),
    "Trainer, bf16": Case("trainer", TRAINER, ("bf16=true",)),
    "Trainer, accumulating in bf16, two processes": Case(
        "trainer", TRAINER, ("gradient_accumulation_steps=2", "bf16=true"), 2
    ),
    "Trainer, FSDP2, two processes": Case("trainer", TRAINER, sharded(2), 2),
    "Trainer, FSDP2, best of its states": Case("trainer", TRAINER, (*sharded(2), *BEST), 2),
    "Trainer, FSDP2, state in shards": Case(
        "trainer", TRAINER, sharded(2, state_dict_type="SHARDED_STATE_DICT"), 2
    ),
    "Trainer, best of its states, two processes": Case("trainer", TRAINER, BEST, 2),
    "Trainer, finding its batch size": Case("trainer", TRAINER, ("auto_find_batch_size=true",)),
    "Trainer, streamed": Case("trainer", (*TRAINER, "datasets"), ("streamed=true",)),
    "Trainer, device_map": Case("trainer", TRAINER, ('device_map="auto"',)),
    "Trainer, device_map, two processes": Case("trainer", TRAINER, ('device_map="auto"',), 2),
    "Trainer, evaluating": Case("evaluating", TRAINER),
    "by hand": Case("by_hand", ("sklearn",)),
    "by hand, two processes": Case("by_hand", ("sklearn",), WHOLE, 2),
    "by hand, bf16, two processes": Case("by_hand", ("sklearn",), ("amp=true", *WHOLE), 2),
    "datasets, streamed": Case("streaming", ("datasets",)),
    "datasets, streamed, two processes": Case(
        "streaming", ("datasets",), ('ways=["dispatched", "dispatched and split"]',), 2
    ),
    "device maps": Case("placed", TRAINER),
    "peft": Case("lora", ("transformers", "peft")),
    "peft, two processes": Case("lora", ("transformers", "peft"), processes=2),
    "trl": Case("fine_tuning", ("transformers", "datasets", "trl")),
    "trl, two processes": Case("fine_tuning", ("transformers", "datasets", "trl"), processes=2),
    "trl's command line": Case(
        "commands", ("transformers", "datasets", "trl", "peft"), ("sft", "dpo", "dpo, launched")
    ),
    "trl's scripts, two processes": Case(
        "commands", ("transformers", "datasets", "trl"), ("sft, two processes", "dpo, two processes")
    ),
    "diffusers": Case("pipeline", ("diffusers",)),
    "diffusers, two processes": Case("pipeline", ("diffusers",), processes=2),
    "sentence-transformers": Case("sentences", ("sentence_transformers",)),
    "sentence-transformers, two processes": Case("sentences", ("sentence_transformers",), processes=2),
    "sentence-transformers, training": Case("training_sentences", ("sentence_transformers", "datasets")),
    "sentence-transformers, training, two processes": Case(
        "training_sentences", ("sentence_transformers", "datasets"), processes=2
    ),
}
"""Name -> case; the original interface gives the same numbers for each."""


def run(python: str, case: Case, folder: Path, prefix: Sequence[str] = (), **variables: str) -> Any:
    """Run a case in an environment of Python and return what it found.

    Args:
        python: the interpreter.
        case: what is run.
        folder: for its files.
        prefix: what starts the program; otherwise the interpreter, or torchrun for several processes.
        **variables: of the environment.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
    start = list(prefix) or [python, *(several if case.processes > 1 else [])]
    command = [*start, str(PROGRAMS / f"{case.program}.py"), str(folder), *case.arguments]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


def allow_training(folder: Path) -> dict[str, str]:
    """Give sentence-transformers the header that its training needs, without changing this environment.

    Args:
        folder: gets a copy of the metadata of this package.

    Returns:
        Variables with which a process finds the copy.
    """
    listed = metadata.distribution("accelerate").files or ()
    source = next(Path(str(each.locate())).parent for each in listed if each.name == "METADATA")
    shutil.copytree(source, folder / source.name)
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "accelerate.commands.clients", "--allow", "sentence-transformers"]
    subprocess.run(command, env={**os.environ, **variables}, capture_output=True, check=True)
    return variables


def numbers_of(found: Any) -> list[float]:
    """Return the numbers in what a program found, in order; text must be equal and is left out."""
    if isinstance(found, dict):
        return [number for key in sorted(found) for number in numbers_of(found[key])]
    if isinstance(found, list):
        return [number for entry in found for number in numbers_of(entry)]
    return [] if isinstance(found, (str, type(None))) else [float(found)]
