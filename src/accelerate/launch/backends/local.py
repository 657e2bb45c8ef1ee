"""One process.

The script runs in a child that is started with `subprocess`, not by replacing this process: other programs
call `launch_command` as a function and expect it to return, and the launcher can say how the script ended.
The child costs a few milliseconds and no import of torch.
"""

from __future__ import annotations

import signal

from accelerate.launch.backends.base import Launcher
from accelerate.launch.children import run_to_end
from accelerate.launch.command import local_command
from accelerate.launch.failures import Exits
from accelerate.launch.pending_signals import REQUESTS
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.recording import folder_of


class LocalLauncher(Launcher):
    """Runs the target as one child process."""

    def command(self, plan: LaunchPlan) -> list[str]:
        """The target's own words."""
        return local_command(plan.target)

    def run(self, plan: LaunchPlan) -> int:
        """Start the target, forward signals to it, and return its exit code."""
        folder = folder_of(plan)  # only our entry unblocks what is blocked at its start
        end = run_to_end(self.command(plan), plan.environment, blocked_at_start=REQUESTS if folder else ())
        if folder and end.killed_after:
            Exits({0: -signal.SIGKILL}, asked=(0,), asked_by=end.killed_after, killed=(0,)).write(folder)
        return end.code
