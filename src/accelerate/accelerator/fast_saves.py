"""Recent checkpoints of a run, which are saved after every few optimizer steps and loaded first.

`FastSaves` is an observer of the run. A prepared loader calls `before_read` before it reads the next batch,
so the whole body of the loop has run, as if it ended with `save_state()`.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import accelerator, checkpointing
from accelerate.accelerator.runtime import Runtime
from accelerate.base import CheckpointError, describe, wrong_value
from accelerate.logging import get_logger
from accelerate.monitoring import SAVING
from accelerate.nested import iterate_tensors
from accelerate.ops import local_tensor
from accelerate.state import run_observers, step_clock

logger = get_logger(__name__)

MakeRequest = Callable[[], checkpointing.Request]
"""Function that returns the counters of the run, in a request for the next numbered checkpoint."""


class FastSaves:
    """Saves recent checkpoints of a run in the fast tier, and finds the newest one.

    Args:
        request: Returns the request for a save of the run as it is now.
        step: Returns `Accelerator.step`.
        durable: Folder of the numbered checkpoints, or None if checkpoints are not numbered.
        save_durable: Saves the run as it is now to the next numbered checkpoint.
    """

    def __init__(
        self,
        runtime: Runtime,
        request: MakeRequest,
        step: Callable[[], int],
        durable: Path | None,
        save_durable: Callable[[], object],
    ) -> None:
        project = runtime.request.project
        if runtime.strategy.state.has_engines:
            raise wrong_value(
                "fast_dir",
                project.fast_dir,
                "the engine of this run writes checkpoints itself",
                "Leave it out",
            )
        self._runtime, self._project = runtime, project
        self._request, self._step, self._durable = request, step, durable
        self._save_durable = save_durable
        self._saved_at = 0  # optimizer steps at the last generation, or at the checkpoint that was loaded
        self._has_space_for: int | None = None  # objects besides models when the space was checked
        self._thread = threading.get_ident()
        self._begun: dict[int, int] = {}  # optimizer steps when the last pass over a loader began, by loader
        name = "" if project.project_dir is None else str(Path(project.project_dir).expanduser().absolute())
        folder = Path(str(project.fast_dir)).expanduser().absolute()
        folder = runtime.groups.own_folder(folder)
        if durable is not None and folder.resolve() == durable.resolve():
            raise wrong_value(
                "fast_dir",
                project.fast_dir,
                "it is the folder of durable checkpoints, and old recent checkpoints are deleted",
                "Choose a folder on a disk of the node, such as one in /dev/shm",
            )
        topology, timeout = runtime.state.topology, runtime.checkpoints.timeout
        self._tier = checkpointing.open_fast_tier(folder, project.copies, name, topology, timeout)
        checkpointing.find_generations(self._tier)  # raises for those of another project
        self._tier.number = checkpointing.next_number(self._tier)
        self._num_found = self._count_durable()
        if runtime.strategy.state.saves_shards:  # no save or load waits for the import of DCP
            import_module("accelerate.checkpointing.shard_files")
        run_observers().put(self)

    # Saving

    def pass_begun(self, loader: object) -> None:
        """Keeps the number of steps before a pass."""
        self._begun[id(loader)] = step_clock.steps

    def pass_ended(self, loader: object) -> None:
        """Forgets a pass."""
        self._begun.pop(id(loader), None)

    def before_read(self, loader: object) -> None:
        """Saves a generation if enough optimizer steps were taken since the last one.

        None is saved in a pass without steps, such as an evaluation in the body of another loop, while ranks
        may have different numbers of batches (`join_uneven_inputs`), while a model has averages in place of
        its weights, and where no gradients are computed.
        """
        if self._runtime.observers.is_ahead:
            return
        every, updates = self._project.fast_every, self._num_updates()
        prepared = self._runtime.prepared
        is_joined = any(optimizer.is_joined for optimizer in prepared.optimizers)
        is_applied = any(each.is_applied for each in (*prepared.averages, *prepared.local_sgd))
        if (
            updates // every <= self._saved_at // every
            or self._begun.get(id(loader)) == step_clock.steps
            or is_joined
            or is_applied
            or not torch.is_grad_enabled()
        ):
            return
        if threading.get_ident() == self._thread:
            self.save()
        else:
            logger.warning_once(
                "No recent checkpoints are saved: a prepared loader is read in another thread than that of "
                "the Accelerator, while steps are taken. Call save_state() in the loop."
            )

    def save(self, *, is_saved: bool = False) -> None:
        """Saves a generation, which is written in the background.

        Called on all ranks.

        Args:
            is_saved: Whether the caller saves the same state to the project. False writes every
                `durable_every`-th generation of the run to the project.
        """
        with step_clock.phase(SAVING):
            is_saved = self._wait(is_saved=is_saved) or is_saved
            updates, before = self._num_updates(), self._saved_at
            self._saved_at = updates
            interval = self._project.fast_every * (self._project.durable_every or 0)
            # A count of generations would begin at 0 after each restart.
            is_durable = not is_saved and interval > 0 and updates // interval > before // interval
            next_durable = max(self._project.iteration, self._num_found) + (is_saved or is_durable)
            request = self._request()
            saver = self._tier.begin(request, next_durable)
            try:
                payloads = self._collect(saver)
            except Exception as error:
                saver.abort(error)
                raise
            except BaseException:  # an interrupt: no rank may wait for this save
                saver.discard()
                raise
            writes_durable = is_durable and self._runtime.groups.is_leader
            self._project.iteration += is_durable  # in all replica groups, of which one writes
            written: Future[list[checkpointing.Payload]] | None = Future() if writes_durable else None
            self._tier.write(saver, payloads, written)
            if written is not None:
                self._write_durable(written, request)

    def _collect(self, saver: checkpointing.GenerationSaver) -> list[checkpointing.Payload]:
        has_hooks = bool(self._runtime.checkpoints.save_hooks)
        staging = saver.staging_of_hooks if has_hooks else saver.staging
        payloads = accelerator.state_items.collect(self._runtime, staging, self._step(), True)
        return [*payloads, *(saver.files_of_hooks() if has_hooks else ())]

    def _write_durable(
        self, written: Future[list[checkpointing.Payload]], request: checkpointing.Request
    ) -> None:
        """Writes the files of a generation to the next numbered checkpoint, in the background."""
        checkpoints = self._runtime.checkpoints

        def copy_and_commit() -> None:
            try:
                files = written.result()
            except CheckpointError:  # `wait` saves the run in place of it
                return
            saver = checkpoints.begin(request)
            saver.write(files, threads=1)
            saver.commit(blocked=0.0)

        checkpoints.background.start(copy_and_commit)

    def before_save(self) -> None:
        """Saves a generation of the state that is saved to the project, too."""
        self.save(is_saved=True)

    def awaited(self) -> None:
        """Waits until the last generation is complete, and otherwise saves the run to the project.

        Called on all ranks. Without numbered checkpoints it raises the error of the generation.
        """
        self._wait(is_saved=False)

    def _wait(self, *, is_saved: bool) -> bool:
        """Returns whether the run has been saved to the project in place of the last generation."""
        try:
            self._tier.background.wait()
        except CheckpointError as error:  # the same one on all ranks
            if self._durable is None:
                raise
            logger.warning(
                f"A recent checkpoint could not be written to the fast tier, so the run is saved to "
                f"{self._durable} now. {error}"
            )
            if not is_saved:
                self._save_durable()
            return True
        return False

    # Loading

    def candidates(
        self, durable: Iterator[checkpointing.CheckpointSource], reader: checkpointing.CheckpointReader
    ) -> Iterator[checkpointing.CheckpointSource]:
        """Yields the generations and durable checkpoints, the newest first.

        Args:
            reader: Reader with the options of the load.
        """
        try:
            self._tier.background.wait()
        except CheckpointError as error:
            if self._durable is None:
                raise
            logger.warning(
                f"The last recent checkpoint could not be written, and an older one is loaded. {error}"
            )
        generations, num_durable = checkpointing.find_generations(self._tier), self._count_durable()
        common = self._runtime.groups.held_by_all([generation.state for generation in generations])
        generations = [generation for generation in generations if generation.state in common]
        recent = [generation for generation in generations if generation.next_durable >= num_durable]
        yield from self._open(recent, reader)
        yield from durable
        yield from self._open([generation for generation in generations if generation not in recent], reader)

    def _count_durable(self) -> int:
        """Returns a number above those of all durable checkpoints."""
        own = 0 if self._durable is None else checkpointing.retention.highest_number(self._durable) + 1
        tier = self._tier
        return int(tier.consensus.decide("accelerator.load_state", own, max, tier.timeout))

    def _open(
        self, generations: Sequence[checkpointing.Generation], reader: checkpointing.CheckpointReader
    ) -> Iterator[checkpointing.CheckpointSource]:
        for generation in generations:
            yield from checkpointing.open_generation(
                self._tier, generation, self._runtime.state.topology, partial(self._files_of_rank, reader)
            )

    def _files_of_rank(
        self, options: checkpointing.CheckpointReader, folder: Path, plans: dict[str, Any]
    ) -> list[str]:
        """Returns the names of the files of shards that this rank reads, and adds the plans to a dict."""
        names = checkpointing.manifest.read(folder, whole=True).files
        own = {} if self._runtime.checkpoints.load_hooks else plans  # a hook may change the models
        reader = replace(options, folder=folder, names=names, is_fast=True, plans=own)
        try:
            return sorted(accelerator.state_items.files_of_rank(self._runtime, reader))
        except Exception as error:  # raised again when the files are read
            logger.debug(f"{folder}: {describe(error)}")
            return [name for name in names if name.endswith(checkpointing.SHARDS)]

    def loaded(self, updates: int) -> None:
        """Counts steps from a checkpoint that was loaded."""
        self._saved_at = updates
        self._tier.number = checkpointing.next_number(self._tier)

    # Space

    def prepared(self) -> None:
        """Raises if the fast folder of a node is too small, for prepared models, optimizers and averages.

        Called on all ranks.
        """
        prepared = self._runtime.prepared
        num_averages = len(prepared.averages) + len(prepared.local_sgd)
        if self._has_space_for == num_averages or not prepared.models or not prepared.optimizers:
            return
        is_sharded = self._runtime.strategy.state.saves_shards
        size = 0
        if is_sharded or self._tier.nodes.is_owner:
            models = (tensor for model in prepared.models for tensor in _tensors_of(model))
            size = sum(_bytes_of(tensor, is_sharded) for tensor in models)
            size += sum(_state_bytes(optimizer.optimizer, is_sharded) for optimizer in prepared.optimizers)
            size += sum(average.nbytes(is_sharded=is_sharded) for average in prepared.averages)
            if prepared.local_sgd:  # a file of each rank with its weights and optimizer states
                size *= 1 + self._runtime.state.topology.local_size
                size += sum(each.nbytes() for each in prepared.local_sgd)
        self._tier.check_space(size, is_sharded)
        self._has_space_for = num_averages

    def _num_updates(self) -> int:
        return max((optimizer.num_updates for optimizer in self._runtime.prepared.optimizers), default=0)


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from (parameter for _, parameter in model.named_parameters())
    yield from model.buffers()


def _bytes_of(tensor: Tensor, is_sharded: bool) -> int:
    """Returns the bytes of a tensor, or of the shard on this rank."""
    local = local_tensor(tensor) if is_sharded else tensor
    return local.numel() * local.element_size()


def _state_bytes(optimizer: torch.optim.Optimizer, is_sharded: bool) -> int:
    """Returns the bytes of the state that an optimizer has, or will have after its first step.

    The step is taken by a copy of the optimizer without memory, on the meta device. An optimizer that cannot
    do so counts without state.
    """
    if optimizer.state:
        return sum(_bytes_of(tensor, is_sharded) for tensor in iterate_tensors(dict(optimizer.state)))
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [
        {
            **group,
            "fused": False,
            "capturable": False,
            "params": [_empty(tensor, is_sharded) for tensor in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(probe)  # without the hooks of the user
    except Exception as error:  # an optimizer of the user may need values
        logger.debug(f"The state of {type(optimizer).__name__} is not estimated: {describe(error)}.")
    return sum(_bytes_of(tensor, False) for tensor in iterate_tensors(dict(probe.state)))


def _empty(tensor: Tensor, is_sharded: bool) -> Tensor:
    """Returns a parameter with a gradient and without memory."""
    like = local_tensor(tensor) if is_sharded else tensor
    parameter = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device="meta"), tensor.requires_grad)
    parameter.grad = torch.empty_like(parameter) if tensor.requires_grad else None
    return parameter
