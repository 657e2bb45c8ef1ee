"""`accelerate clients`: what client libraries find, and the header that one of them needs."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.commands import clients
from accelerate.commands.clients import HEADER, clients_command, clients_command_parser
from accelerate.commands.utils import run_command

BODY = "# accelerate\n\nHome-page: of a text that follows\n"


def install(folder: Path, name: str, version: str, *lines: str, body: str = "") -> Path:
    """Write what pip leaves of a distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    head = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines]
    (info / "METADATA").write_text("\n".join(head) + "\n\n" + body)
    names = ("METADATA", "RECORD", "WHEEL")
    (info / "RECORD").write_text("".join(f"{info.name}/{each},,\n" for each in names))
    return info


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site-packages"
    install(site, "accelerate", "1.15.0+indep.1", "Summary: x", body=BODY)
    monkeypatch.setattr("sys.path", [str(site)])
    return site


def call(*words: str) -> None:
    clients_command(clients_command_parser().parse_args(list(words)))


def test_ranges_and_gates(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "Peft", "0.21.0", "Requires-Dist: accelerate>=0.21.0", "Requires-Dist: torch")
    install(site, "pinned", "1.0", "Requires-Dist: accelerate==1.13.0; extra == 'x'", "Requires-Dist: ???")
    install(site, "sentence-transformers", "6.2.0", "Requires-Dist: accelerate>=0.20.3; extra == 'train'")
    install(site, "llamafactory", "0.9", "Requires-Dist: accelerate<=1.15.0,>=1.3.0")
    install(site, "other", "1.0", "Requires-Dist: torch")
    found = {each.name: each for each in clients.find_clients(metadata.distribution("accelerate"))}
    assert list(found) == ["llamafactory", "peft", "pinned", "sentence-transformers"]
    assert found["peft"].refusals == ()
    assert found["pinned"].refusals == ("it requires accelerate==1.13.0",)
    assert "DISABLE_VERSION_CHECK=1" in found["llamafactory"].refusals[0]
    assert "accelerate clients --allow" in found["sentence-transformers"].refusals[0]
    call()
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert [line.split() for line in printed.splitlines() if line.startswith("peft")] == [
        ["peft", "0.21.0", "accepts"]
    ]


def test_without_client_libraries_no_library_is_listed(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call()
    assert "No installed library requires it." in capsys.readouterr().out


def test_the_header_is_written_and_removed(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "sentence-transformers", "6.2.0", "Requires-Dist: accelerate; extra == 'train'")
    info = site / "accelerate-1.15.0+indep.1.dist-info"
    before = (info / "METADATA").read_text()
    os.chmod(info / "METADATA", 0o640)
    call("--allow", "sentence-transformers")
    printed = capsys.readouterr().out
    assert "does not claim" in printed
    assert printed.index("does not claim") < printed.index(HEADER)
    package: Any = metadata.distribution("accelerate")
    assert "huggingface" in package.metadata["Home-page"]
    assert package.metadata.get_payload() == BODY
    assert clients.find_clients(package)[0].refusals == ()
    assert (info / "METADATA").stat().st_mode & 0o777 == 0o640
    rows = {
        row[0].rpartition("/")[2]: row[1:] for row in csv.reader((info / "RECORD").read_text().splitlines())
    }
    content = (info / "METADATA").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    assert rows["METADATA"] == [f"sha256={digest}", str(len(content))]
    assert sorted(os.listdir(info)) == ["METADATA", "RECORD"]
    call("--allow", "setfit")
    assert "already" in capsys.readouterr().out
    call("--undo")
    assert HEADER in capsys.readouterr().out
    assert (info / "METADATA").read_text() == before
    call("--undo")
    assert "nothing was changed" in capsys.readouterr().out
    assert (info / "METADATA").read_text() == before


@pytest.mark.parametrize("there", [True, False])
def test_an_installation_that_cannot_be_changed(
    there: bool, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site / "accelerate-1.15.0+indep.1.dist-info"
    (info / "RECORD").unlink()
    if not there:
        (info / "METADATA").unlink()
        info.rmdir()
    with pytest.raises(SystemExit) as end:
        run_command(clients_command, clients_command_parser().parse_args(["--allow", "setfit"]))
    assert end.value.code == 2
    assert "pip install ." in capsys.readouterr().err


def test_a_folder_that_is_read_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(
        ConfigurationError, match=r"cannot be written: Permission denied\. Run this as the user"
    ):
        call("--allow", "sentence-transformers")
