"""trl's command line on tiny models and data: by itself, through the launchers, and with a file of settings.

Usage: commands.py FOLDER [WAY ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import trl.scripts
from material import llama, tell, text, tokenizer

BIN, SCRIPTS = Path(sys.executable).parent, Path(trl.scripts.__file__).parent
SETTINGS = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
main_process_port: 0
"""
PAIR = ("prompt", "chosen", "rejected")
STEPS = 3
COMMON = f"""
    --max_steps {STEPS} --save_steps {STEPS} --logging_steps 1 --learning_rate 1e-3 --max_length 64
    --per_device_train_batch_size 2 --use_cpu --bf16 false --dtype float32 --gradient_checkpointing false
    --report_to none --disable_tqdm true
""".split()
ADAPTER = ["--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_target_modules", "q_proj", "v_proj"]


def write(folder: Path) -> None:
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "two.yaml").write_text(SETTINGS, encoding="utf-8")
    pieces = [text(40 * 30)[start : start + 30] for start in range(0, 40 * 30, 30)]
    rows = {
        "sft": [{"text": piece} for piece in pieces],
        "dpo": [dict(zip(PAIR, pieces[place : place + 3], strict=True)) for place in range(24)],
    }
    for name, entries in rows.items():
        (folder / name).mkdir()
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / name / "train.jsonl").write_text(lines, encoding="utf-8")


def ways(folder: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> (what starts it, data and method)."""
    settings, own = str(folder / "two.yaml"), [str(BIN / "trl")]
    launch = [str(BIN / "accelerate"), "launch", "--cpu"]
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return {
        "sft": ([*own, "sft"], "sft"),
        "dpo": ([*own, "dpo", *ADAPTER], "dpo"),
        "dpo, launched": ([*launch, "--num_processes", "1", str(SCRIPTS / "dpo.py"), *ADAPTER], "dpo"),
        "sft, two processes": ([*several, str(SCRIPTS / "sft.py")], "sft"),
        "sft, with settings": ([*own, "sft", "--accelerate_config", settings], "sft"),
        "dpo, two processes": ([*several, str(SCRIPTS / "dpo.py")], "dpo"),
        "dpo, launched with settings": ([*launch, "--config_file", settings, str(SCRIPTS / "dpo.py")], "dpo"),
    }


def losses_of(folder: Path, start: list[str], method: str, output: str) -> list[float]:
    more = ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / method)]
    command = [*start, *COMMON, *more, "--output_dir", str(folder / output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    state = json.loads((folder / output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text("utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def main() -> None:
    folder = Path(sys.argv[1])
    write(folder)
    known = ways(folder)
    wanted = sys.argv[2:] or list(known)
    tell({name: losses_of(folder, *known[name], output=name.replace(", ", "-")) for name in wanted})


if __name__ == "__main__":
    main()
