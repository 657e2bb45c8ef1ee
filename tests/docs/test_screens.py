"""The programs of the guides fail as shown there: each line is of a real run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCKS = r"```python\n(# {name}\n.*?)```\n\n```console\n\$ accelerate launch (.*?)\n```\n\n```text\n(.*?)```"
# What is not the same in each run: marks below a line, and which rank is first to lose its connection.
CHANGING = re.compile(r"^( *[\^~]+|Reported before:|accelerate: hang: rank 0 .*|ranks? .* afterwards: .*|)$")


def normalize(text: str) -> list[str]:
    """Return the lines without folders, names of hosts and numbers that differ from run to run."""
    text = re.sub(r"[^\s\"]*/([a-z]+\.(py|json))", r"\1", text)
    text = re.sub(r" on [\w.-]+(?= failed first|\) is at)", "", text)
    return re.sub(r"(process |since |#|\d+ of )\d+|\d+(?= of \d)", r"\1N", text).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), [("launching.md", "fail.py"), ("troubleshooting.md", "hang.py")])
def test_a_screen_is_what_the_program_shows(page: str, name: str, tmp_path: Path) -> None:
    found = re.search(BLOCKS.format(name=name), (GUIDES / page).read_text(), re.DOTALL)
    assert found is not None, f"{page} has no program {name} with its command and its screen"
    script, command, screen = found.groups()
    (tmp_path / name).write_text(script)
    ended = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *command.split()],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    report = re.search(r"For machines: (\S+)", ended.stderr)
    assert report is not None, ended.stderr
    shutil.rmtree(Path(report[1]).parent)
    shown = normalize(ended.stderr)
    missing = [line for line in normalize(screen) if line not in shown and not CHANGING.match(line)]
    assert ended.returncode == 1
    assert missing == [], ended.stderr
