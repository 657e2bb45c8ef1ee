"""One process."""

from __future__ import annotations

from accelerate.strategies.base import Strategy


class SingleProcess(Strategy):
    """Training in one process: everything as the base class has it."""
