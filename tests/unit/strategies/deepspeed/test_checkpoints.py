"""Tests of an engine as a part of a checkpoint, with an engine that writes two files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.checkpointing import CheckpointReader
from accelerate.state import Topology
from accelerate.strategies import keep_file
from accelerate.strategies.deepspeed import EnginePart


class Engine:
    def __init__(self, found=True, universal=False, elastic=False, nvme=False):
        self.loaded = []
        self.nvme = nvme
        self.found = found
        self.universal = universal
        self.elastic = elastic

    def load_universal_checkpoint(self):
        return self.universal

    def zero_elastic_checkpoint(self):
        return self.elastic

    def zero_nvme_offload_optimizer(self):
        return self.nvme

    def save_checkpoint(self, folder, tag, save_latest):
        place = Path(folder)
        (place / tag).mkdir()
        for name in (f"{tag}/model.pt", f"{tag}/optimizer.pt", "zero_to_fp32.py"):
            (place / name).write_text(tag)
        if save_latest:
            (place / "latest").write_text(tag)

    def load_checkpoint(self, folder, tag, load_module_strict):
        self.loaded.append((folder, tag, load_module_strict))
        return (folder if self.found else None), {}


def test_processes_of_a_machine_share_what_is_sealed(tmp_path):
    names = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        part = EnginePart(0, Engine(), Topology(rank=rank, size=2, local_rank=rank, local_size=2), folder)
        names.append([payload.name for payload in part.collect()])
    assert sorted(names[0] + names[1]) == [
        "latest",
        "pytorch_model/model.pt",
        "pytorch_model/optimizer.pt",
        "zero_to_fp32.py",
    ]


def test_later_engines_have_folders_with_numbers(tmp_path):
    part = EnginePart(1, Engine(), Topology(), tmp_path)
    assert {payload.name for payload in part.collect()} == {
        "pytorch_model_1/model.pt",
        "pytorch_model_1/optimizer.pt",
        "zero_to_fp32.py",
    }


def test_files_of_the_engine_are_kept(tmp_path):
    path = tmp_path / "file"
    path.write_text("engine's")
    keep_file(None, path)
    assert path.read_text() == "engine's"


def test_engines_are_loaded_by_their_folder(tmp_path):
    engine = Engine()
    part = EnginePart(0, engine, Topology())
    with pytest.raises(CheckpointError, match="holds no pytorch_model"):
        part.read(CheckpointReader(tmp_path))
    (tmp_path / "pytorch_model").mkdir()
    part.read(CheckpointReader(tmp_path, model_kwargs={"strict": False})).apply()
    assert engine.loaded == [(str(tmp_path), "pytorch_model", False)]


def test_an_engine_that_finds_nothing_is_an_error(tmp_path):
    (tmp_path / "pytorch_model").mkdir()
    change = EnginePart(0, Engine(found=False), Topology()).read(CheckpointReader(tmp_path))
    with pytest.raises(CheckpointError, match="found nothing to load"):
        change.apply()


def test_an_engine_that_read_what_a_save_has_replaced_is_an_error(tmp_path):
    def confirm():
        raise CheckpointError("replaced")

    (tmp_path / "pytorch_model").mkdir()
    change = EnginePart(0, Engine(), Topology()).read(CheckpointReader(tmp_path, confirm=confirm))
    with pytest.raises(CheckpointError, match="^replaced$"):
        change.apply()


@pytest.fixture
def of_two(tmp_path):
    """A checkpoint of two processes."""
    (tmp_path / "pytorch_model").mkdir()
    for rank in range(2):
        (tmp_path / "pytorch_model" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    return tmp_path


def test_shards_of_another_number_of_processes_are_refused_before_anything_is_loaded(of_two):
    engine = Engine()
    with pytest.raises(CheckpointError, match=r"saved by 2 processes.*this run has 1\. Start 2") as caught:
        EnginePart(0, engine, Topology()).read(CheckpointReader(of_two))
    assert "ds_to_universal --inject_missing_state --input_folder" in str(caught.value)
    assert engine.loaded == []
    EnginePart(0, engine, Topology(rank=1, size=2)).read(CheckpointReader(of_two)).apply()
    EnginePart(0, Engine(elastic=True), Topology()).read(CheckpointReader(of_two)).apply()


def test_loading_optimizer_states_on_nvme_is_refused(of_two, tmp_path, caplog, states):
    from accelerate import PartialState

    PartialState(cpu=True)
    engine = Engine(nvme=True)
    with pytest.raises(CheckpointError, match="offload_optimizer_device='cpu'"):
        EnginePart(0, engine, Topology(rank=1, size=2)).read(CheckpointReader(of_two))
    assert engine.loaded == []
    folder = tmp_path / "saved"
    folder.mkdir()
    EnginePart(0, engine, Topology(), folder).collect()
    assert "this checkpoint will not load" in caplog.text


def test_a_universal_checkpoint_is_written_beside_the_other_or_replaces_it(of_two):
    engine = Engine(universal=True)
    part = EnginePart(0, engine, Topology())
    with pytest.raises(
        CheckpointError, match="holds no universal checkpoint.* Create it: python -m deepspeed"
    ):
        part.read(CheckpointReader(of_two))
    (of_two / "pytorch_model" / "zero").mkdir()
    part.read(CheckpointReader(of_two)).apply()
    (of_two / "pytorch_model_universal" / "zero").mkdir(parents=True)
    part.read(CheckpointReader(of_two)).apply()
    assert [tag for _, tag, _ in engine.loaded] == ["pytorch_model", "pytorch_model_universal"]


def test_a_run_saves_and_loads_through_its_engine(start, parts, tmp_path):
    accelerator, given = start(), parts()
    model, optimizer, _ = accelerator.prepare(given.model, given.optimizer, given.loader)
    engine = Engine()
    model.save_checkpoint, model.load_checkpoint = engine.save_checkpoint, engine.load_checkpoint
    model.load_universal_checkpoint = engine.load_universal_checkpoint
    model.zero_elastic_checkpoint = engine.zero_elastic_checkpoint
    model.zero_nvme_offload_optimizer = engine.zero_nvme_offload_optimizer
    folder = accelerator.save_state(tmp_path / "saved")
    assert (folder / "manifest.json").is_file()
    assert (folder / "pytorch_model" / "model.pt").read_text() == "pytorch_model"
    assert not list(folder.glob("optimizer*")) + list(folder.glob("model*"))
    accelerator.load_state(folder)
    assert engine.loaded == [(str(folder), "pytorch_model", True)]
    (folder / "pytorch_model" / "model.pt").write_text("damaged file")
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        accelerator.load_state(folder)


def test_without_engines_models_are_saved_by_themselves(states, tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    folder = accelerator.save_state(tmp_path / "saved")
    assert (folder / "model.safetensors").is_file()
