"""`accelerate checkpoint`: what people and machines see of checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import LocalShards, Manifest, Shard, files_under, manifest, seal, shard_files
from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.weights import write_safetensors


def save(parent: Path, number: int, weight: float) -> Path:
    folder = parent / f"checkpoint_{number}"
    folder.mkdir(parents=True)
    write_safetensors(
        {"weight": torch.full((4,), weight), "bias": torch.zeros(2)}, folder / "model.safetensors"
    )
    torch.save({"state": {0: torch.ones(3)}, "lr": weight}, folder / "optimizer.bin")
    records = {name: seal(folder, name) for name in files_under(folder)}
    Manifest(
        records, world_size=2, step=10 * number, epoch=number, created="2026-01-01T00:00:00+00:00"
    ).write(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for number, weight in ((1, 0.5), (2, 0.5), (10, 0.75)):
        save(tmp_path / "checkpoints", number, weight)
    return tmp_path


def run(*words: Any) -> None:
    args = make_cli_parser(["checkpoint"]).parse_args(["checkpoint", *map(str, words)])
    args.func(args)


def test_the_step_is_the_number_of_updates_where_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Manifest({}, world_size=1, step=8, run={"updates": [4, 3]}).write(tmp_path)
    run("list", tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)[0]["step"] == 4


def test_list_shows_the_newest_first_and_why_one_is_broken(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "checkpoints/checkpoint_2/optimizer.bin").unlink()
    run("list", project, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["checkpoint_10", "checkpoint_2", "checkpoint_1"]
    assert [row["complete"] for row in rows] == [True, False, True]
    assert rows[0]["step"] == 100
    assert rows[0]["processes"] == 2
    assert "optimizer.bin is missing" in rows[1]["fault"]
    run("list", project / "checkpoints")
    text = capsys.readouterr().out
    assert "checkpoint_10" in text
    assert "checkpoints/checkpoint_2 is not complete: optimizer.bin is missing" in " ".join(text.split())


LONG = "epoch-3-of-the-longest-run-with-a-loss-of-0.1234567"


HEAD = ["checkpoint", "step", "epoch", "saved", "(UTC)", "size", "ranks", "complete"]


def words_of_tables(project: Path, capsys: pytest.CaptureFixture[str], columns: int) -> list[list[str]]:
    """What `list` shows in a terminal of some width, when one path is long and one checkpoint is broken."""
    shutil.copytree(project / "checkpoints/checkpoint_1", project / "named" / LONG)
    rewrite(project / "named" / LONG, step=123456, epoch=1000)
    (project / "checkpoints/checkpoint_2/optimizer.bin").unlink()
    run("list", project)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    return [line.split() for line in lines]


def test_tables_fit_80_columns_and_cut_nothing_off(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(project)
    words = words_of_tables(project, capsys, 80)
    begin = words.index(["named"])
    assert words[:3] == [["checkpoints"], HEAD, ["checkpoint_10", "100", "10", *words[2][3:]]]
    assert words[2][3:5] + words[2][-2:] == ["2026-01-01", "00:00", "2", "yes"]
    assert words[3][-1] == "no"
    assert words[begin + 1] == HEAD
    assert words[begin + 2][1:5] == ["123456", "1000", "2026-01-01", "00:00"]
    assert "".join(row[0] for row in words[begin + 2 : begin + 5]) == LONG
    assert words[begin + 5][:3] == ["checkpoints/checkpoint_2", "is", "not"]


def test_a_wide_terminal_shows_one_table(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(project)
    words = words_of_tables(project, capsys, 200)
    assert words[:2] == [["."], HEAD]
    names = [f"checkpoints/checkpoint_{number}" for number in (10, 2, 1)]
    assert [row[0] for row in words[2:6]] == [*names, f"named/{LONG}"]


def test_differences_of_long_names_get_a_line_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.10.self_attention.query_projection.weight"
    for folder, value in (("a", 1.0), ("b", 1.5)):
        (tmp_path / folder).mkdir()
        write_safetensors({name: torch.full((4,), value)}, tmp_path / folder / "model.safetensors")
    monkeypatch.setenv("COLUMNS", "80")
    run("diff", tmp_path / "a", tmp_path / "b")
    assert capsys.readouterr().out.splitlines() == [
        f"model.safetensors:{name}:",
        "    4 of 4 elements, by 0.5 at most",
        "1 of 1 entries differ.",
    ]


def test_verify_prints_the_number_of_complete_checkpoints(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("verify", project)
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 3 are complete and undamaged."
    run("verify", project / "checkpoints/checkpoint_1")
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 are complete and undamaged."


def test_list_finds_checkpoints_of_any_name_at_any_depth(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project / "checkpoints/checkpoint_1", project / "best")
    shutil.copytree(project / "checkpoints/checkpoint_1", project / "a/b/c/epoch 3")
    run("list", project, "--json")
    rows = json.loads(capsys.readouterr().out)
    assert [Path(row["path"]).relative_to(project).as_posix() for row in rows] == [
        "best",
        "a/b/c/epoch 3",
        *(f"checkpoints/checkpoint_{number}" for number in (10, 2, 1)),
    ]
    assert all(row["complete"] for row in rows)


def test_names_with_newlines_are_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, 0.5).rename(tmp_path / "a\nb\tc")
    run("list", tmp_path)
    assert r"'a\nb\tc'" in capsys.readouterr().out
    (tmp_path / "a\nb\tc/optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match=re.escape(r"'a\nb\tc'")):
        run("verify", tmp_path)
    assert "\t" not in capsys.readouterr().out


def test_verify_reads_every_byte(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("verify", project)
    path = project / "checkpoints/checkpoint_1/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run("list", project)
    with pytest.raises(CheckpointError, match="checkpoint_1"):
        run("verify", project)
    with pytest.raises(CheckpointError, match="checkpoint_1"):
        run("verify", project / "checkpoints/checkpoint_1")
    assert "does not fit its checksum" in capsys.readouterr().out


def test_diff_prints_names_and_sizes_of_differences(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = project / "checkpoints"
    run("diff", parent / "checkpoint_1", parent / "checkpoint_2")
    assert capsys.readouterr().out == "0 of 4 entries differ.\n"
    (parent / "checkpoint_2/optimizer.bin").unlink()
    run("diff", parent / "checkpoint_1", parent / "checkpoint_2", "--json")
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} == {
        "optimizer.bin:lr",
        "optimizer.bin:state.0",
    }
    run("diff", parent / "checkpoint_1", parent / "checkpoint_10")
    text = capsys.readouterr().out
    assert "model.safetensors:weight: 4 of 4 elements, by 0.25 at most" in text
    assert "optimizer.bin:lr: 0.5 and 0.75" in text


def save_shards(parent: Path, name: str, weight: float) -> Path:
    """Two processes' shards of a tensor, with a value and a file of other software beside them."""
    tensor, folder = torch.full((4, 2), weight), parent / name
    reports = []
    for rank in range(2):
        rows = Shard((2 * rank, 0), tensor[2 * rank : 2 * rank + 2])
        state = {("model", "weight"): LocalShards((4, 2), tensor.dtype, (rows,)), ("model", "lr"): weight}
        payload = shard_files.payload("model_0", rank, state)
        (folder / "model_0").mkdir(parents=True, exist_ok=True)
        reports.append(payload.write(payload.content, folder / payload.name))
    assert payload.finish is not None
    payload.finish(folder / "model_0", reports)
    (folder / "notes.txt").write_text(str(weight))
    torch.save({"error": KeyError}, folder / "custom_checkpoint_0.pkl")
    return folder


def test_shards_are_compared_as_whole_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = save_shards(tmp_path, "a", 0.5), save_shards(tmp_path, "b", 0.75)
    run("diff", first, second)
    assert capsys.readouterr().out.splitlines() == [
        "model_0:model.lr: 0.5 and 0.75",
        "model_0:model.weight: 8 of 8 elements, by 0.25 at most",
        "notes.txt: different files, by their checksums; contents are not compared",
        "3 of 4 entries differ.",
    ]
    run("diff", first, save_shards(tmp_path, "c", 0.5))
    assert capsys.readouterr().out == "0 of 4 entries differ.\n"
    (second / "model_0/__1_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="model_0/__1_0.distcp has 0 bytes"):
        run("diff", first, second)
    (second / "model_0/.metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not metadata of shards"):
        run("diff", first, second)


def test_a_damaged_file_is_named(project: Path) -> None:
    first, second = (project / f"checkpoints/checkpoint_{number}" for number in (1, 2))
    (second / "optimizer.bin").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin cannot be read"):
        run("diff", first, second)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a manifest, with a matching checksum."""
    content = {**json.loads((folder / manifest.NAME).read_text()), **changes}
    del content[manifest._SEAL]
    content[manifest._SEAL] = manifest._seal_of(content)
    (folder / manifest.NAME).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"../../mine": {"size": 0, "checksum": "0" * 16}}}, "has a component '..'"),
        ({"files": []}, "files=[], and a JSON object"),
        ({"run": {"updates": [None]}}, "run.updates=[None]"),
        ({"created": "[/red]\x1b[2J"}, "created="),
        ({"format": "1"}, "has format '1'"),
    ],
)
def test_a_malicious_manifest_is_one_clear_error(
    project: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    newest, mine = project / "checkpoints/checkpoint_10", project / "checkpoints/mine"
    mine.touch()
    rewrite(newest, **changes)
    run("list", project)
    assert message in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="Not complete and undamaged: checkpoint_10"):
        run("verify", project)
    with pytest.raises(CheckpointError) as error:
        run("diff", newest, newest)
    assert message in str(error.value)
    run("prune", project, "--keep", 1)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["checkpoint_10", "checkpoint_2", "mine"]


def test_values_of_a_manifest_are_not_markup(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(project / "checkpoints/checkpoint_10", created="[/red]")
    run("list", project)
    assert "[/red]" in capsys.readouterr().out


def test_prune_keeps_the_newest(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("prune", project, "--keep", 1, "--json")
    gone = json.loads(capsys.readouterr().out)["deleted"]
    assert [Path(path).name for path in gone] == ["checkpoint_1", "checkpoint_2"]
    assert [path.name for path in (project / "checkpoints").iterdir()] == ["checkpoint_10"]
    run("prune", project, "--keep", 1)
    assert "nothing to delete" in capsys.readouterr().out


def test_mistakes_are_named(project: Path) -> None:
    with pytest.raises(ConfigurationError, match="--keep=0"):
        run("prune", project, "--keep", 0)
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        run("list", project / "nothing")
    (project / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        run("list", project / "empty")
    assert (project / "checkpoints/checkpoint_1" / manifest.NAME).is_file()
