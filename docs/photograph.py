"""Write the pictures of screens in the guides, each of a real run on CPU processes.

`python docs/photograph.py` makes all of them, `python docs/photograph.py report` one. The report needs the
program `chromium`, the plan needs transformers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from html import escape
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from accelerate.monitoring import RunReader, find_records, render

DOCS = Path(__file__).parent
SCREENS = DOCS / "screens"
EXAMPLES = DOCS.parent / "examples"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
LAUNCH = [*ACCELERATE, "launch", "--quiet", "--cpu", "--num_processes", "2"]
SIZE = "900,1080"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
FONT = re.compile(r"@font-face \{.*?\}\n", re.DOTALL)


def write_screen(
    path: Path, command: str, content: RenderableType, description: str, width: int = 100
) -> None:
    """Write what a command showed as SVG, which loads no font from a network."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, highlight=False)
        console.print(content)
    head, mark, rest = FONT.sub("", console.export_svg(title=command, unique_id=path.stem)).partition(">")
    words = f"\n<title>{escape(command)}</title>\n<desc>{escape(description)}</desc>"
    path.write_text(head + mark + words + rest, encoding="utf-8")


def photograph_view() -> None:
    """Draws the view of a run with a slow rank, while it trains."""
    with tempfile.TemporaryDirectory() as name:
        script = EXAMPLES / "doctor" / "slow_rank.py"
        reader = RunReader(
            script.stem, lambda: [(found.rank, found.path) for found in find_records(Path(name))]
        )
        run = subprocess.Popen([*LAUNCH, str(script), "--project", name, "--steps", "400"])
        while run.poll() is None:
            time.sleep(1)
            view = reader.read()
            states = {view.state(rank) for rank in view.ranks}
            if states == {"running"} and any(rank.conclusions for rank in view.ranks):
                text = "The time of a step by phase, two ranks with their memory, and that rank 1 is slow."
                command = "accelerate monitor slow_rank"
                write_screen(SCREENS / "view.svg", command, render(view), text)
        if run.returncode:
            raise subprocess.CalledProcessError(run.returncode, run.args)


def photograph_plan() -> None:
    """Draw the memory plan of a Llama with 1.1 billion parameters."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "llama-1.1b").mkdir()
        Path(name, "llama-1.1b", "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        words = "estimate-memory llama-1.1b --batch_size 4 --sequence_length 1024 --mixed_precision bf16"
        command = [*ACCELERATE, *words.split(), "--devices", "4x24GB"]
        shown = subprocess.run(command, cwd=name, check=True, capture_output=True, text=True).stdout
    text = "The memory of each part as a table and a bar, the largest batch, and layouts that fit."
    write_screen(SCREENS / "plan.svg", f"accelerate {words} --devices 4x24GB", Text(shown), text, 116)


def photograph_report() -> None:
    """Photograph the report of a run with a failure in the middle, in Chromium."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "restart")
        words = ["--project", str(folder), "--num_epochs", "8", "--save_every", "50", "--die_at", "170"]
        subprocess.run(
            [*LAUNCH, "--max_restarts", "1", str(EXAMPLES / "restart.py"), *words],
            check=True,
        )
        page, profile = Path(name, "report.html"), Path(name, "profile")
        subprocess.run([*ACCELERATE, "report", str(folder), "--output", str(page)], check=True)
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        looks = [f"--window-size={SIZE}", "--hide-scrollbars", f"--screenshot={SCREENS / 'report.png'}"]
        subprocess.run([*browser, *looks, page.as_uri()], check=True, capture_output=True)


PICTURES: dict[str, Callable[[], None]] = {
    "view": photograph_view,
    "plan": photograph_plan,
    "report": photograph_report,
}


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    for chosen in sys.argv[1:] or PICTURES:
        PICTURES[chosen]()
