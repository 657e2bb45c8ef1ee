"""What a forked rank does to become a script."""

from __future__ import annotations

import os
import runpy
import sys
import warnings


def run_script(path: str, *options: str) -> None:
    """Run a script as its program; its warnings are no errors, as the suite makes them."""
    warnings.resetwarnings()
    sys.argv = [path, *options]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
