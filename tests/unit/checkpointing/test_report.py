"""The lines about a save or a load."""

from __future__ import annotations

from pathlib import Path

from accelerate.checkpointing import loaded_lines, saved_lines

FOLDER = Path("runs/a")


def test_each_file_has_its_line() -> None:
    names = [
        "custom_checkpoint_1.pkl",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "scaler.pt",
        "sampler.bin",
        "sampler_2.bin",
        "scheduler.bin",
        "optimizer.bin",
        "optimizer_1.bin",
        "model_1.safetensors",
        "pytorch_model.bin",
        "stream_0_0.bin",
    ]
    assert saved_lines(FOLDER, names, ["Counter", "Average"]) == [
        "Model weights saved in runs/a/model_1.safetensors",
        "Model weights saved in runs/a/pytorch_model.bin",
        "Optimizer state saved in runs/a/optimizer.bin",
        "Optimizer state saved in runs/a/optimizer_1.bin",
        "Scheduler state saved in runs/a/scheduler.bin",
        "Sampler state for dataloader 0 saved in runs/a/sampler.bin",
        "Sampler state for dataloader 2 saved in runs/a/sampler_2.bin",
        "Gradient scaler state saved in runs/a/scaler.pt",
        "Random states saved in runs/a/random_states_0.pkl",
        "Saving the state of Average to runs/a/custom_checkpoint_1.pkl",
        "Saving the state of Counter to runs/a/custom_checkpoint_0.pkl",
    ]


def test_a_folder_of_shards_has_one_line() -> None:
    names = ["pytorch_model_fsdp_0/a", "pytorch_model_fsdp_0/b", "optimizer_0/a"]
    assert saved_lines(FOLDER, names, []) == [
        "Model weights saved in runs/a/pytorch_model_fsdp_0",
        "Optimizer state saved in runs/a/optimizer_0",
    ]


def test_what_was_loaded() -> None:
    lines = loaded_lines(FOLDER, True, ["Counter"])
    assert lines == [
        "All model weights loaded successfully",
        "All optimizer states loaded successfully",
        "All scheduler states loaded successfully",
        "All dataloader sampler states loaded successfully",
        "GradScaler state loaded successfully",
        "All random states loaded successfully",
        "Loading in 1 custom states",
        "Loading the state of Counter from runs/a/custom_checkpoint_0.pkl",
    ]
    assert loaded_lines(FOLDER, False, [])[4:] == [
        "All random states loaded successfully",
        "Loading in 0 custom states",
    ]
