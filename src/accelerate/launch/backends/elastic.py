"""Several processes: torch's elastic agent, in this process."""

from __future__ import annotations

import sys

from accelerate.base.environ import patch_environment
from accelerate.base.errors import LaunchError
from accelerate.launch.backends.local import exit_code
from accelerate.launch.command import torchrun_arguments
from accelerate.launch.plan import LaunchPlan


class ElasticLauncher:
    """Runs the target in each of the plan's processes on this machine, and restarts them as asked."""

    def run(self, plan: LaunchPlan) -> int:
        """Start the agent, wait for it, and return the exit code of the process that failed first."""
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        with patch_environment(**plan.environment):
            try:
                torchrun.run(torchrun.parse_args(torchrun_arguments(plan)))  # type: ignore[no-untyped-call]
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                code = exit_code(failure.exitcode)
                print(f"accelerate launch: rank {rank} failed first, with exit code {code}.", file=sys.stderr)
                return code or 1
            except SignalException as error:
                return 128 + int(error.sigval)
            except RendezvousError as error:
                meeting = plan.rendezvous
                raise LaunchError(
                    f"The processes did not meet at {meeting.address}:{meeting.port}: {error}"
                ) from error
        return 0
