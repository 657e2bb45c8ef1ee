"""Run by Python at its start, with this folder on PYTHONPATH: importing accelerate starts the simulation."""

from __future__ import annotations

import importlib.abc
import sys


class Switch(importlib.abc.MetaPathFinder):
    """Waits for the first import of accelerate."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "accelerate":
            sys.meta_path.remove(self)
            from simulated import simulate

            simulate()


sys.meta_path.insert(0, Switch())
