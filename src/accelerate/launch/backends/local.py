"""One process.

The script runs in a child that is started with `subprocess`, not by replacing this process: other programs
call `launch_command` as a function and expect it to return, and the launcher can say how the script ended.
The child costs a few milliseconds and no import of torch.
"""

from __future__ import annotations

from accelerate.launch.backends.base import Launcher
from accelerate.launch.children import run_child
from accelerate.launch.command import local_command
from accelerate.launch.plan import LaunchPlan


class LocalLauncher(Launcher):
    """Runs the target as one child process."""

    def command(self, plan: LaunchPlan) -> list[str]:
        """The target's own words."""
        return local_command(plan.target)

    def run(self, plan: LaunchPlan) -> int:
        """Start the target, forward signals to it, and return its exit code."""
        return run_child(self.command(plan), plan.environment)
