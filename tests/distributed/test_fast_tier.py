"""Recent checkpoints on several nodes, each of which is a folder that some ranks see."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import AccelerateError
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

Run = Callable[..., list[Any]]

EVERY = 3
KILLS = Path(__file__).parents[1] / "chaos" / "fast_tier.py"


def train(
    folder: Path, per_node: int, sharded: bool, until: int, resumes: bool = False, **options: Any
) -> Any:
    """Trains up to a number of steps, and returns the step it began at and the weights."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    node = int(os.environ["RANK"]) // per_node
    project = {"project_dir": str(folder / "project"), "automatic_checkpoint_naming": True}
    accelerator = Accelerator(
        fsdp_plugin=plugin if sharded else None,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        project_config=ProjectConfiguration(
            **project, fast_dir=str(folder / f"node_{node}"), fast_every=EVERY, **options
        ),
    )
    set_seed(3)
    model = nn.Sequential(nn.Linear(5, 37), nn.Dropout(0.2), nn.Linear(37, 1))
    data: Any = torch.randn(64, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2, shuffle=True)
    )
    if resumes:
        accelerator.load_state()
    began = optimizer.num_updates
    while optimizer.num_updates < until:
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.num_updates == until:
                break
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return began, {name: tensor.clone() for name, tensor in (state or {}).items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_a_node_is_lost_with_its_files(run: Run, tmp_path: Path, sharded: bool) -> None:
    whole = run(train, tmp_path / "whole", 1, sharded, 13, processes=2)[0][1]
    run(train, tmp_path / "lost", 1, sharded, 8, processes=2)
    shutil.rmtree(tmp_path / "lost" / "node_0")
    resumed = run(train, tmp_path / "lost", 1, sharded, 13, True, processes=2)
    assert [began for began, _ in resumed] == [6, 6]
    assert not (tmp_path / "lost" / "project" / "checkpoints").exists()
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed[0][1].items())


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(("before", "after"), [((4, 2), (2, 1)), ((3, 1), (4, 2)), ((4, 1), (3, 1))])
def test_another_number_of_ranks_and_nodes(
    run: Run, tmp_path: Path, sharded: bool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    saved = run(train, tmp_path, before[1], sharded, 7, processes=before[0])
    metadata = [path.read_bytes() for path in tmp_path.glob("node_*/*/optimizer_0/.metadata")]
    assert len(set(metadata)) == sharded  # all nodes write the same
    shutil.rmtree(tmp_path / "node_1")
    if before == (3, 1):  # the third node is the second one of the two that are left
        (tmp_path / "node_2").rename(tmp_path / "node_1")
    resumed = run(train, tmp_path, after[1], sharded, 6, True, processes=after[0])
    again = run(train, tmp_path / "again", before[1], sharded, 6, processes=before[0])[0][1]
    assert {began for began, _ in resumed} == {6}
    assert all(torch.equal(again[name], tensor) for name, tensor in resumed[0][1].items())
    assert saved[0][0] == 0


def test_a_flipped_byte_is_named_and_the_file_is_read_from_another_node(run: Run, tmp_path: Path) -> None:
    run(train, tmp_path, 1, True, 4, processes=2)
    (manifest,) = (tmp_path / "node_0").glob("checkpoint_*/manifest.json")
    assert json.loads(manifest.read_text())["run"]["holders"] == ["node 0", "node 1"]
    assert f"-{socket.gethostname()}-" not in manifest.read_text()
    (path,) = (tmp_path / "node_0").glob("checkpoint_*/optimizer_0/__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    resumed = run(load_with_log, tmp_path, processes=2)
    assert [began for began, _ in resumed] == [3, 3]
    lines = [line for _, log in resumed for line in log if "does not fit its checksum" in line]
    assert len(lines) == 1
    assert str(path.parents[1]) in lines[0]
    assert "optimizer_0/__0_0.distcp" in lines[0]
    assert not any("skipped" in line for _, log in resumed for line in log)


def train_with_durable(folder: Path) -> None:
    """Trains with generations at the steps 3 and 6, of which the second one is also durable."""
    train(folder, 1, True, 7, durable_every=2)


def test_a_file_is_damaged_on_the_only_node_that_holds_it(run: Run, tmp_path: Path) -> None:
    run(train_with_durable, tmp_path, processes=2)
    name = "checkpoint_1/optimizer_0/__0_0.distcp"
    path = tmp_path / "node_1" / name
    (tmp_path / "node_0" / name).unlink()
    path.write_bytes(bytes(path.stat().st_size))
    resumed = run(load_with_log, tmp_path, processes=2)
    assert [began for began, _ in resumed] == [6, 6]
    skipped = [line for line in resumed[0][1] if "A checkpoint was skipped" in line]
    assert len(skipped) == 1
    assert "no remaining node stores optimizer_0/__0_0.distcp" in skipped[0]


def load_with_log(folder: Path) -> tuple[int, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    began, _ = train(folder, 1, True, 3, True)
    return began, lines


class Value:
    """Registered object, whose value is another one on each rank, unlike a durable checkpoint expects."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def load_values(folder: Path, node: int, saves: bool) -> tuple[int, list[float]]:
    rank = int(os.environ["RANK"])
    project = ProjectConfiguration(fast_dir=str(folder / f"node_{(node + rank) % 3}"), copies=1)
    accelerator = Accelerator(project_config=project)
    set_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    value = Value(rank)
    accelerator.register_for_checkpointing(value)
    if saves:
        accelerator.backward(model(torch.randn(8, 4) + rank).sum())
        optimizer.step()
        accelerator.save_state(folder / "durable")
    else:
        accelerator.load_state()
    accelerator.end_training()
    return value.value, model.module[0].running_mean.tolist()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_generation_has_the_objects_of_the_first_rank(run: Run, tmp_path: Path, lost: int) -> None:
    _, mean = run(load_values, tmp_path, 0, True, processes=3)[0]
    shutil.rmtree(tmp_path / f"node_{lost}")
    # the nodes that are left have other ranks than before
    assert run(load_values, tmp_path, 1, False, processes=3) == [(0, mean)] * 3


def test_without_a_holder_the_durable_checkpoint_is_loaded(run: Run, tmp_path: Path) -> None:
    run(train_without_copies, tmp_path, 10, False, processes=2)
    shutil.rmtree(tmp_path / "node_1")
    assert [began for began, _ in run(train_without_copies, tmp_path, 10, True, processes=2)] == [6, 6]


def train_without_copies(folder: Path, until: int, resumes: bool) -> Any:
    """Trains with generations at the steps 3, 6 and 9, of which the second one is also durable."""
    return train(folder, 1, True, until, resumes, copies=0, durable_every=2)


def refuse(folder: Path, copies: int, node: int | None) -> str:
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)
    with pytest.raises(AccelerateError) as caught:
        Accelerator(
            project_config=ProjectConfiguration(
                fast_dir=str(folder / f"node_{rank if node is None else node}"), copies=copies
            )
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("copies", "node", "message"),
    [
        (2, None, "copies=2: the run has 2 nodes, and a copy is on another node. Use at most 1"),
        (1, 0, "the ranks 0 and 1 are on different nodes and access the same folder"),
    ],
    ids=["copies", "network disk"],
)
def test_bad_options_are_refused_on_all_ranks(
    run: Run, tmp_path: Path, copies: int, node: int | None, message: str
) -> None:
    messages = run(refuse, tmp_path, copies, node, processes=2)
    assert all(message in text for text in messages), messages


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--strategy", "fsdp"], ["--strategy", "ddp", "--per_node", "2"], ["--nodes", "3"]], ids=str
)
def test_failures_at_random_moments_mix_no_generations(options: list[str]) -> None:
    words = [sys.executable, str(KILLS), "--kills", "12", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
