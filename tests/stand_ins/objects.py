"""Objects of a user that tests register, save and load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Counter:
    """Has a state that a checkpoint saves."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class CreatesFolder:
    """Creates a folder when it is unpickled without restrictions, as code in a malicious file would."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
