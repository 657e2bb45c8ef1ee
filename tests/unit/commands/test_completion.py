from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.commands.accelerate_cli import COMMANDS
from accelerate.commands.completion import SHELLS, main, make_script


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "accelerate.bash"
    path.write_text(make_script("bash"))
    return path


def complete(script: Path, folder: Path, *words: str) -> list[str]:
    """Return the completions of bash for the last word."""
    program = (
        f"source {script}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        'eval "$(complete -p accelerate | sed -E "s/.*-F ([^ ]+) .*/\\1/")"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = [str(shutil.which("bash")), "--norc", "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_flags_values_and_files(bash: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    assert set(complete(bash, tmp_path, "accelerate", "")) >= set(COMMANDS)
    assert complete(bash, tmp_path, "accelerate", "lau") == ["launch"]
    assert complete(bash, tmp_path, "accelerate", "config", "up") == ["update"]
    assert complete(bash, tmp_path, "accelerate", "launch", "--mixed_p") == ["--mixed_precision"]
    assert complete(bash, tmp_path, "accelerate", "launch", "--mixed_precision", "b") == ["bf16"]
    assert complete(bash, tmp_path, "accelerate", "launch", "--config_file", "m") == ["mine.yaml"]
    assert complete(bash, tmp_path, "accelerate", "completion", "f") == ["fish"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_contain_all_commands_and_flags(shell: str, tmp_path: Path) -> None:
    text = make_script(shell)
    for word in (*COMMANDS, "mixed_precision", "bf16", "num_processes"):
        assert word in text
    program = shutil.which(shell)
    if program is not None:  # and the shell itself, where there is one, finds nothing wrong with it
        path = tmp_path / "script"
        path.write_text(text)
        subprocess.run([program, "-n", str(path)], check=True, timeout=60)


def test_descriptions_are_short() -> None:
    assert COMMANDS["launch"][1] in make_script("zsh")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate-completion", shell])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "accelerate" in capsys.readouterr().out
