"""Write the picture of a report: of a real run of `examples/restart.py`, in Chromium.

`python docs/photograph_report.py` runs it, on two CPU processes; it needs the program `chromium`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
SCRIPT = DOCS.parent / "examples" / "restart.py"
PICTURE = DOCS / "pictures" / "report.png"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
LAUNCH = [*ACCELERATE, "launch", "--cpu", "--num_processes", "2", "--max_restarts", "1"]
SIZE = "900,1080"


def main() -> None:
    """Run the example with a failure in the middle, and photograph the page about it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "restart")
        words = ["--project", str(folder), "--num_epochs", "8", "--save_every", "50", "--die_at", "170"]
        subprocess.run([*LAUNCH, str(SCRIPT), *words], check=True)
        page, profile = Path(name, "report.html"), Path(name, "profile")
        subprocess.run([*ACCELERATE, "report", str(folder), "--output", str(page)], check=True)
        browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        looks = [f"--window-size={SIZE}", "--hide-scrollbars", f"--screenshot={PICTURE}"]
        subprocess.run([*browser, *looks, page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
