"""transformers' models by real DeepSpeed engines, in two processes on the CPU: its Trainer, shared sequences.

Needs the packages deepspeed (0.19.8) and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.utils import is_deepspeed_available, is_transformers_available, set_seed

pytestmark = pytest.mark.slow
Run = Callable[..., list[Any]]
ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture(autouse=True)
def packages() -> None:
    if not (is_deepspeed_available() and is_transformers_available()):
        pytest.skip("deepspeed and transformers are not both installed")


class Texts(torch.utils.data.Dataset[Any]):
    """Random texts of eight tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.tokens[index]
        return {"input_ids": text, "labels": text, "position_ids": torch.arange(len(text))}


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=4, attn_implementation="sdpa", **sizes)
    set_seed(0)
    return LlamaForCausalLM(config)


# The Trainer


def write_config(folder: str, stage: int) -> str:
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "betas": "auto",
                "eps": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
            },
        },
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
    }
    path = Path(folder, f"zero{stage}.{os.environ.get('RANK', 'all')}.json")
    path.write_text(json.dumps(config))
    return str(path)


def build_trainer(folder: str, deepspeed: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        seed=7,
        deepspeed=deepspeed,
    )
    return Trainer(tiny_llama(), arguments, train_dataset=Texts())


def logged(trainer: Any) -> list[Any]:
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]


def train_by_trainer(folder: str, stage: int, as_path: bool) -> tuple[list[Any], list[Any]]:
    warnings.simplefilter("ignore")
    path = write_config(folder, stage)
    config = path if as_path else json.loads(Path(path).read_text())
    trainer = build_trainer(folder, config)
    trainer.train()
    trainer.save_model(f"{folder}/last")
    again = build_trainer(folder, config)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return logged(trainer), logged(again)


@pytest.mark.parametrize(("stage", "as_path"), [(2, True), (3, False)])
def test_the_trainer_of_transformers(run: Run, tmp_path: Path, stage: int, as_path: bool) -> None:
    whole, resumed = run(train_by_trainer, str(tmp_path), stage, as_path, env=ENVIRONMENT, timeout=300)[0]
    assert len(whole) == 4
    assert all(norm > 0 for _, norm in whole)
    for row, expected in zip(resumed[-2:], whole[-2:], strict=True):
        assert row == pytest.approx(expected, abs=1e-3)
    assert (tmp_path / "last" / "model.safetensors").is_file()


def train_alike(folder: str) -> list[Any]:
    warnings.simplefilter("ignore")
    trainer = build_trainer(folder, write_config(folder, 2))
    trainer.train()
    return logged(trainer)


def test_the_launcher_names_the_file_for_the_trainer(run: Run, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    expected = run(train_alike, str(tmp_path / "made"), env=ENVIRONMENT, timeout=300)[0]
    script, result = tmp_path / "train.py", tmp_path / "result.json"
    script.write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_deepspeed_transformers import build_trainer, logged\n"
        "trainer = build_trainer(sys.argv[1], None)\n"
        "assert trainer.accelerator.state.deepspeed_plugin.zero_stage == 2\n"
        "trainer.train()\n"
        "if trainer.is_world_process_zero():\n"
        "    json.dump(logged(trainer), open(sys.argv[2], 'w'))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--use_deepspeed"]
    file = write_config(str(tmp_path), 2)
    command += ["--num_processes", "2", "--deepspeed_config_file", file, str(script)]
    done = subprocess.run(
        [*command, str(tmp_path / "launched"), str(result)],
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for row, wanted in zip(json.loads(result.read_text()), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)


# Shared sequences


def share_sequences(size: int) -> tuple[list[float], str]:
    warnings.simplefilter("ignore")  # DeepSpeed calls what torch deprecates
    mesh = ParallelismConfig(sp_size=size) if size > 1 else None
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), parallelism_config=mesh)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(Texts(), batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for batch in batches:
        labels = batch.pop("labels", None)
        shifted = batch.pop("shift_labels", None)
        if shifted is None:
            shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = model(**batch).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
        items = accelerator.reduce((shifted != -100).sum(), "sum")
        loss = total / items
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(accelerator.reduce(loss.detach(), "sum")))
    return losses, type(batches).__name__


def test_processes_that_share_sequences_have_the_losses_of_one(run: Run) -> None:
    ((whole, plain),) = run(share_sequences, 1, processes=1, env=ENVIRONMENT, timeout=120)
    for losses, name in run(share_sequences, 2, env=ENVIRONMENT, timeout=120):
        assert losses == pytest.approx(whole, abs=1e-4)
        assert (plain, name) == ("DataLoaderShard", "SequenceLoader")
