"""How data is read, gradients are accumulated and a project's files are named."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.plugins.checks import at_least
from accelerate.plugins.handlers import KwargsHandler


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """After how many backward passes the optimizer steps.

    Args:
        num_steps: number of backward passes for one optimizer step; None takes what the environment or the
            constructor argument of `Accelerator` says.
        adjust_scheduler: whether prepared schedulers also count the passes that do not step.
        sync_with_dataloader: whether the last batch of a loader ends the window early.
        sync_each_batch: whether gradients are exchanged after every pass: less memory with sharded
            parameters, more traffic.

    Raises:
        ConfigurationError: fewer than one pass.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            at_least("num_steps", self.num_steps, 1)


@dataclass
class DataLoaderConfiguration:
    """How loaders are prepared; attributes that are assigned later take effect at the next `prepare`.

    Args:
        split_batches: True divides each batch of the loader among the processes; False gives each process
            batches of its own, so that one step sees `num_processes` batches.
        dispatch_batches: True reads on the first process only and sends each its share; None does so for
            iterable datasets that no process can divide.
        even_batches: whether the last batches are filled up from the beginning so that all processes get
            equally many.
        use_seedable_sampler: whether shuffling is a function of `data_seed` and the epoch alone.
        data_seed: seed of that shuffling; None draws one from torch's generator.
        non_blocking: whether batches are copied to the device without waiting for it.
        use_stateful_dataloader: whether loaders go on by themselves after a checkpoint was loaded; where
            torchdata is installed, they are its `StatefulDataLoader` too.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Where a project's files go and how its checkpoints are named.

    Args:
        project_dir: folder for everything the project writes.
        logging_dir: folder of local trackers; None is the project folder.
        automatic_checkpoint_naming: whether `save_state` numbers its folders.
        total_limit: how many numbered checkpoints are kept; None keeps all.
        iteration: number of the next checkpoint.
        save_on_each_node: whether each machine writes what otherwise only the first one writes. Machines that
            do not see the folder of the first one do so in any case.
        async_save: whether `save_state` writes in the background unless told otherwise.

    Raises:
        ConfigurationError: a limit below one, or a negative iteration.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            at_least("total_limit", self.total_limit, 1)
        at_least("iteration", self.iteration, 0)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project folder; the logging folder follows unless it was given.

        Args:
            project_dir: the new project folder.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
