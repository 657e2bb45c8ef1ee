"""Checkpoints in shards: each process writes its own, and reads what it needs."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.tensor.debug import CommDebugMode

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import CheckpointError
from accelerate.checkpointing import manifest, saving, shard_files
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

Run = Callable[..., list[Any]]

SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
WAYS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_version": 2},
    "fsdp1": {"fsdp_version": 1, **SHARDED},
    "fsdp1, own parameters": {"fsdp_version": 1, **SHARDED, "use_orig_params": True},
}


class Net(nn.Module):
    """With a tied and a frozen parameter, and a buffer."""

    def __init__(self, fixed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(3, 7, bias=False)
        self.leave = nn.Linear(3, 7, bias=False)
        self.leave.weight = self.enter.weight
        self.scale = nn.Parameter(torch.ones(7), requires_grad=not fixed)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.enter(x) + self.leave(x)) * self.scale


def prepared(way: str) -> tuple[Any, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(**WAYS[way])
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = Net(fixed=way != "fsdp1")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 3) * (accelerator.process_index + 1)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def facts(accelerator: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole weights and states, as the first process gets them."""
    strategy = accelerator._runtime.strategy.state
    (owner,) = strategy.optimizer_owners([optimizer], gather=True)
    weights = strategy.state_dict(model, unwrap=True)
    states = {
        (index, key): value.clone()
        for index, values in owner.state_dict()["state"].items()
        for key, value in values.items()
    }
    return {**{name: tensor.clone() for name, tensor in weights.items()}, **states}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def save_and_load(way: str) -> Any:
    accelerator, model, optimizer = prepared(way)
    states = [facts(accelerator, model, optimizer)]
    accelerator.save_state("first")
    step(accelerator, model, optimizer)
    states.append(facts(accelerator, model, optimizer))
    accelerator.save_state("second", blocking=False)
    for _ in range(3):  # the thread that writes uses no collective
        step(accelerator, model, optimizer)
    accelerator.wait_for_checkpoint()
    good = []
    with torch.no_grad():
        model(torch.ones(2, 3))  # parameters that are kept whole after it
    for folder, state in zip(("first", "second"), states, strict=True):
        accelerator.load_state(folder)
        good.append(same(facts(accelerator, model, optimizer), state))
    names = sorted(path.relative_to("second").as_posix() for path in Path("second").rglob("*.*"))
    return good, names, set(manifest.read(Path("second")).files) == set(names) - {"manifest.json"}


@pytest.mark.parametrize(
    "way", ["fsdp2", "fsdp1", pytest.param("fsdp1, own parameters", marks=pytest.mark.slow)]
)
def test_all_ranks_restore_sharded_checkpoints(run: Run, way: str) -> None:
    for good, names, listed in run(save_and_load, way):
        assert good == [True, True]
        assert listed
        assert names == [
            "manifest.json",
            "optimizer_0/.metadata",
            "optimizer_0/__0_0.distcp",
            "optimizer_0/__1_0.distcp",
            "pytorch_model_fsdp_0/.metadata",
            "pytorch_model_fsdp_0/__0_0.distcp",
            "pytorch_model_fsdp_0/__1_0.distcp",
            "random_states_0.pkl",
            "random_states_1.pkl",
        ]


def count_collectives() -> Any:
    """How many collectives it takes to write the shards of a model and an optimizer, by us and by torch."""
    accelerator, model, optimizer = prepared("fsdp1")
    strategy = accelerator._runtime.strategy.state
    with CommDebugMode() as ours:
        for owner in (strategy.model_shards(model), strategy.optimizer_shards(optimizer, [model])):
            payload = shard_files.payload(owner.root, accelerator.process_index, owner.state())
            path = Path(payload.name)
            path.parent.mkdir(exist_ok=True)
            payload.write(payload.content, path)
    with warnings.catch_warnings(), CommDebugMode() as torch_s:
        warnings.simplefilter("ignore")
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.state_dict()
            FSDP.optim_state_dict(model, optimizer.optimizer)
    return ours.get_total_counts(), torch_s.get_total_counts()


def test_shards_under_fsdp_1_are_written_without_a_collective(run: Run) -> None:
    for ours, of_torch in run(count_collectives):
        assert ours == 0
        assert of_torch > 0  # torch gathers each unit: the reason for a sharded state dict of our own


def break_and_load(way: str) -> Any:
    """Damage a checkpoint in several ways; return each error, and whether anything was changed."""
    accelerator, model, optimizer = prepared(way)
    accelerator.save_state("other")
    step(accelerator, model, optimizer)
    accelerator.save_state("good")
    before = facts(accelerator, model, optimizer)
    shard = Path("good/pytorch_model_fsdp_0/__1_0.distcp")
    content = shard.read_bytes()
    foreign = Path("other/pytorch_model_fsdp_0/__1_0.distcp").read_bytes()
    assert len(foreign) == len(content)
    messages = []
    for broken in (None, content[:-50], foreign):
        for known in (True, False):
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                shard.unlink(missing_ok=True)
                if broken is not None:
                    shard.write_bytes(broken)
                if not known:
                    Path("good/manifest.json").rename("aside")
            accelerator.wait_for_everyone()
            try:
                accelerator.load_state("good")
                messages.append("")
            except CheckpointError as error:
                messages.append(str(error))
            unchanged = same(facts(accelerator, model, optimizer), before)
            if accelerator.is_main_process:  # others have no whole weights to compare
                assert unchanged == bool(messages[-1])
            accelerator.wait_for_everyone()
            if accelerator.is_main_process and not known:
                Path("aside").rename("good/manifest.json")
    return messages


@pytest.mark.parametrize("way", ["fsdp2", pytest.param("fsdp1", marks=pytest.mark.slow)])
def test_a_damaged_shard_is_named_before_anything_is_changed(run: Run, way: str) -> None:
    first, second = run(break_and_load, way)
    assert first == second
    gone, gone_unknown, cut, cut_unknown, foreign, foreign_unknown = first
    assert all("nothing was changed" in text for text in first[:5])
    assert "pytorch_model_fsdp_0/__1_0.distcp is missing" in gone
    assert gone.count("is missing") == 1
    assert "pytorch_model_fsdp_0/__1_0.distcp is missing" in gone_unknown
    assert "pytorch_model_fsdp_0/__1_0.distcp" in cut
    assert "it is truncated" in cut
    assert "it is truncated" in cut_unknown
    assert "__1_0.distcp does not fit its checksum: it is damaged, or another file" in foreign
    assert foreign_unknown == ""  # of the same size, without a manifest: nothing says so


def chunks() -> dict[str, int]:
    """How many pieces of each tensor the metadata knows: no rank writes what another has."""
    with Path("state/pytorch_model_fsdp_0/.metadata").open("rb") as file:
        entries = pickle.load(file).state_dict_metadata
    return {key: len(entry.chunks) for key, entry in entries.items()}


def fail_to_write() -> Any:
    accelerator, model, optimizer = prepared("fsdp2")
    accelerator.save_state("state")
    before = facts(accelerator, model, optimizer)
    step(accelerator, model, optimizer)
    write = shard_files.torch.save
    messages = []

    def full(*arguments: Any) -> None:
        if accelerator.process_index == 1:
            raise RuntimeError("unexpected pos 64 vs 0")
        write(*arguments)

    shard_files.torch.save = full  # type: ignore[assignment]
    for blocking in (True, False):
        try:
            accelerator.save_state("state", blocking=blocking)
            accelerator.wait_for_checkpoint()
        except CheckpointError as error:
            messages.append(str(error))
    shard_files.torch.save = write
    accelerator.load_state("state")
    return messages, same(facts(accelerator, model, optimizer), before), chunks()


def test_a_save_that_fails_on_one_rank_leaves_the_old_one(run: Run) -> None:
    for messages, unchanged, pieces in run(fail_to_write):
        assert pieces == {"model.enter.weight": 2, "model.leave.weight": 2, "model.scale": 2, "model.mean": 1}
        assert len(messages) == 2
        for message in messages:
            assert "(process 1: " in message
            assert "__1_0.distcp could not be written" in message
        assert unchanged


def save_one_object(way: str) -> Any:
    """Save and load the model and the optimizer by themselves, in each form and from each into the run."""
    accelerator, model, optimizer = prepared(way)
    good = []
    for form in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)
        before = facts(accelerator, model, optimizer)
        save_fsdp_model(plugin, accelerator, model, form)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, form)
        step(accelerator, model, optimizer)
        changed = not same(facts(accelerator, model, optimizer), before)
        assert changed == accelerator.is_main_process  # others have no whole weights to compare
        result = load_fsdp_model(plugin, accelerator, model, form)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, form)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        good.append(same(facts(accelerator, model, optimizer), before))
    return good, sorted(path.as_posix() for path in Path().rglob("*_STATE_DICT/**/*") if path.is_file())


@pytest.mark.parametrize(
    "way",
    ["fsdp2", *(pytest.param(way, marks=pytest.mark.slow) for way in ("fsdp1", "fsdp1, own parameters"))],
)
def test_single_objects_are_saved_and_loaded(run: Run, way: str) -> None:
    for good, names in run(save_one_object, way):
        assert good == [True, True]
        assert names == [
            "FULL_STATE_DICT/optimizer.bin",
            "FULL_STATE_DICT/pytorch_model_fsdp.bin",
            *(
                f"SHARDED_STATE_DICT/{folder}/{name}"
                for folder in ("optimizer_0", "pytorch_model_fsdp_0")
                for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
            ),
        ]


def save_and_be_killed(folder: str, blocking: bool) -> None:
    accelerator, model, optimizer = prepared("fsdp2")
    accelerator.save_state(f"{folder}/state")
    torch.save(facts(accelerator, model, optimizer), f"{folder}/facts_{accelerator.process_index}")
    step(accelerator, model, optimizer)
    saving.WRITE_TIMEOUT = 1.0
    write = shard_files.torch.save

    def killed(*arguments: Any) -> None:
        write(*arguments)
        if accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    shard_files.torch.save = killed  # type: ignore[assignment]
    accelerator.save_state(f"{folder}/state", blocking=blocking)
    accelerator.wait_for_checkpoint()


def load_after(folder: str) -> bool:
    accelerator, model, optimizer = prepared("fsdp2")
    step(accelerator, model, optimizer)
    accelerator.load_state(f"{folder}/state")
    wanted = torch.load(f"{folder}/facts_{accelerator.process_index}")
    return same(facts(accelerator, model, optimizer), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_killed_in_a_save_leaves_the_old_one(
    run: Run, end: Callable[..., Any], tmp_path: Path, blocking: bool
) -> None:
    ended = end(save_and_be_killed, str(tmp_path), blocking)
    assert ended.codes[1] == -signal.SIGKILL
    assert ended.codes[0] != 0
    assert run(load_after, str(tmp_path)) == [True, True]
