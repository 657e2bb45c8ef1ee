"""Facet of `Accelerator`: runs, models and single objects, saved and loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate import accelerator, checkpointing, hooks, plugins, weights
from accelerate.accelerator.runtime import Runtime
from accelerate.base import (
    CheckpointError,
    ConfigurationError,
    as_builtin,
    describe,
    progress_bar,
    refuse_path,
    size_of,
)
from accelerate.logging import get_logger
from accelerate.monitoring import SAVING, Checkpoint
from accelerate.state import run_records, step_clock

logger = get_logger(__name__)

Folder = str | os.PathLike[str]

CHECKPOINTS = "checkpoints"
"""The folder of numbered checkpoints in that of the project."""


class Persistence:
    """Saving and loading; called on all ranks unless a method says otherwise."""

    _runtime: Runtime
    step: int

    # The whole run

    def save_state(
        self,
        output_dir: Folder | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything that the run needs to go on, as one checkpoint; called on all ranks.

        Models, optimizers, schedulers, the gradient scaler, order and position of loaders, random generators
        of every rank, and objects given to `register_for_checkpointing`. The folder appears when all ranks
        have written all of it; until then, and if anything fails, an older one of that name stays as it was.

        Args:
            output_dir: the folder; with `ProjectConfiguration(automatic_checkpoint_naming=True)` it is a
                numbered one in the project's folder `checkpoints`, whatever is passed.
            safe_serialization: whether models are written as safetensors, and not with `torch.save`.
            blocking: False returns as soon as everything is copied, and writes in the background; None takes
                the opposite of `ProjectConfiguration.async_save`. One save is in flight at a time; what goes
                wrong in it is raised by the next call, `wait_for_checkpoint` or `end_training`.
            **save_model_func_kwargs: taken for compatibility; plain and DDP models need none.

        Returns:
            The folder of the checkpoint.

        Raises:
            ConfigurationError: there is no folder to save to.
            CheckpointError: something could not be written; on all ranks.
            StateError: a rank did not come in time; on all that did.
        """
        with step_clock.phase(SAVING):
            return self._save_state(output_dir, safe_serialization, blocking)

    def _save_state(self, output_dir: Folder | None, safe_serialization: bool, blocking: bool | None) -> Path:
        runtime, project = self._runtime, self._runtime.request.project
        checkpoints = runtime.checkpoints
        checkpoints.background.wait()
        saver = checkpoints.begin(self._request(output_dir))
        staging, request = saver.staging, saver.staging.request
        logger.info(f"Saving current state to {request.target}")
        if request.iteration is not None:
            project.iteration = request.iteration + 1
        try:
            payloads = accelerator.checkpoint_items.collect(runtime, staging, self.step, safe_serialization)
        except Exception as error:
            saver.abort(error)
            raise
        except BaseException:  # an interrupt: no rank may wait for this save
            saver.discard()
            raise
        with progress_bar(
            f"Saving {request.target.name}", written=lambda: size_of(staging.folder.rglob("*"))
        ):
            is_blocking = not project.async_save if blocking is None else blocking
            checkpoints.write(saver, payloads, blocking=is_blocking)
        return request.target

    def wait_for_checkpoint(self) -> None:
        """Return when the save in the background, if there is one, is committed; called on all ranks.

        Raises:
            CheckpointError: it has failed; once, on all ranks.
        """
        with step_clock.phase(SAVING):
            self._runtime.checkpoints.background.wait()

    @progress_bar("Loading a checkpoint")
    def load_state(
        self,
        input_dir: Folder | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        world_size_policy: checkpointing.WorldSizePolicy = "reseed",
        **load_model_func_kwargs: Any,
    ) -> None:
        """Bring everything that is prepared and registered to the state of a checkpoint; called on all ranks.

        All files are compared with their checksums, and with the objects that they are for, before anything
        is changed. If an object still refuses its state, the error names the objects that were changed.

        Args:
            input_dir: the checkpoint; None takes the newest complete one of the project, and says which ones
                it skipped and why.
            load_kwargs: arguments of `torch.load`.
            world_size_policy: what is done when another number of processes saved it: "strict" refuses,
                "reseed" derives new random states for each rank, "ignore" keeps what there is.
            **load_model_func_kwargs: arguments of `load_state_dict` of the models, such as `strict`; also
                `map_location`, "cpu" or "on_device".

        Raises:
            ConfigurationError: there is no such folder, or none is given where checkpoints are not numbered.
            CheckpointError: no complete checkpoint is there, it is damaged, or it does not fit the run.
            StateError: a rank did not come in time.
        """
        runtime = self._runtime
        checkpointing.loading.check_policy(world_size_policy)
        runtime.checkpoints.background.wait()
        options = dict(load_model_func_kwargs)
        device = checkpointing.read_device(options.pop("map_location", None))
        skipped: list[str] = []
        cause: CheckpointError | None = None
        for source in self._candidates(input_dir):
            checkpointing.loading.announce(source, runtime.state.num_processes, world_size_policy)
            names = None if source.manifest is None else source.manifest.files
            load = checkpointing.CheckpointReader(
                source.folder, device, dict(load_kwargs or {}), options, names, confirm=source.confirm
            )
            try:
                changes, progress = self._read(source, load, world_size_policy)
            except CheckpointError as error:
                if not source.was_replaced:
                    skipped.append(f"{source.folder}: {error}")
                cause = error
                continue
            for line in dict.fromkeys(skipped):
                logger.warning(f"A checkpoint was skipped. {line}.")
            logger.info(f"Loading states from {source.folder}")
            checkpointing.apply_all(changes, partial(source.agree, was_read=False))
            has_scaler = runtime.strategy.precision.scaler is not None
            for line in checkpointing.loaded_lines(
                source.folder, has_scaler, _types(runtime.prepared.custom)
            ):
                logger.info(line)
            self._go_on_after(source, progress)
            return
        raise checkpointing.loading.nothing_to_load(input_dir, list(dict.fromkeys(skipped))) from cause

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the run.

        Args:
            *objects: each has `state_dict` and `load_state_dict`.

        Raises:
            ConfigurationError: one has not; none is registered then.
        """
        strange = [
            type(obj).__name__
            for obj in objects
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
        ]
        if strange:
            raise ConfigurationError(
                f"Objects of type {', '.join(strange)} cannot be saved: each needs the methods `state_dict` "
                "and `load_state_dict`. Nothing was registered."
            )
        self._runtime.prepared.custom.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function before each save.

        Args:
            hook: called on all ranks with the list of models, the list of their weights, and the folder that
                is being written. Weights that it takes from the list are not saved; what it writes to the
                folder becomes part of the checkpoint.

        Returns:
            A handle whose `remove()` takes the hook away.
        """
        return self._runtime.checkpoints.add_hook(self._runtime.checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a function before each load.

        Args:
            hook: called on all ranks with the list of models and the folder. Models that it takes from the
                list are not loaded.

        Returns:
            A handle whose `remove()` takes the hook away.
        """
        return self._runtime.checkpoints.add_hook(self._runtime.checkpoints.load_hooks, hook)

    # Models and objects

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state of a prepared model; call it on all ranks.

        Args:
            model: a prepared module.
            unwrap: names without the prefixes of wrappers.
        """
        return self._runtime.strategy.state_dict(model, unwrap=unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: Folder,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model as other libraries read them; called on all ranks.

        Args:
            model: a prepared module.
            save_directory: folder for `model.safetensors`, or for several files and their index.
            max_shard_size: bytes of a file, also as text such as "5GB".
            safe_serialization: whether safetensors is written, and not `pytorch_model.bin`.

        Raises:
            ConfigurationError: the folder is a file, the size is none, or the model is on several devices
                in parts that have no values.
        """
        refuse_path("save_directory", save_directory)
        is_empty = any(parameter.device.type == "meta" for parameter in model.parameters())
        if is_empty and not hooks.is_any_offloaded(model):
            raise ConfigurationError(
                f"{type(model).__name__} has parameters without values (on the meta device), which cannot be "
                "saved: load its weights first."
            )
        with step_clock.phase(SAVING):
            state = self._runtime.strategy.state_dict(model, unwrap=True)
            if self._runtime.state.is_main_process:
                checkpointing.save_sharded(state, Path(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: Folder, safe_serialization: bool = False) -> None:
        """Write an object to one file, on the main process; called on any ranks.

        Args:
            obj: anything that can be pickled; with `safe_serialization` a dictionary of tensors.
            f: the file; one that was there is whole until the new one is.
            safe_serialization: write the format of safetensors.
        """
        project = self._runtime.request.project
        weights.save(obj, f, project.save_on_each_node, safe_serialization)

    # How it is done

    def _request(self, output_dir: Folder | None) -> checkpointing.Request:
        runtime, project = self._runtime, self._runtime.request.project
        numbered = project.automatic_checkpoint_naming
        if not output_dir and not numbered:
            raise as_builtin(_no_folder("save_state", "save to", "output_dir"), TypeError)
        session = runtime.checkpoints
        iteration = None
        refuse_path("output_dir", output_dir or "")
        target = Path(output_dir or "").expanduser()
        if numbered:
            iteration = project.iteration
            target = _numbered_folder(project) / checkpointing.retention.name_of(iteration)
        loaders = runtime.prepared.loaders
        gradients = runtime.gradient_state
        if not gradients.sync_gradients:
            logger.warning_once(
                "save_state() in the middle of an accumulation window: the gradients gathered so far are not "
                "saved, and a run that goes on from here differs. Save where `sync_gradients` is True."
            )
        return checkpointing.Request(
            target,
            session.timeout,
            step=self.step,
            epoch=int(getattr(loaders[0], "iteration", 0)) if loaders else 0,
            iteration=iteration,
            keep=project.total_limit if numbered else None,
            custom=_types(runtime.prepared.custom),
            run={
                "sync_gradients": gradients.sync_gradients,
                "num_steps": gradients.num_steps,
                "updates": [optimizer.num_updates for optimizer in runtime.prepared.optimizers],
                "gradient_order": [
                    runtime.strategy.gradient_order(model) for model in runtime.prepared.models
                ],
            },
        )

    def _candidates(self, input_dir: Folder | None) -> Iterator[checkpointing.CheckpointSource]:
        runtime, project = self._runtime, self._runtime.request.project
        session = runtime.checkpoints
        run = session.consensus, runtime.state.topology, session.timeout
        if input_dir is not None:
            return checkpointing.loading.open_checkpoint(Path(input_dir).expanduser(), *run)
        if not project.automatic_checkpoint_naming:
            raise _no_folder("load_state", "load from", "input_dir")
        return checkpointing.loading.open_newest(_numbered_folder(project), *run)

    def _read(
        self, source: checkpointing.CheckpointSource, options: checkpointing.CheckpointReader, policy: str
    ) -> tuple[list[checkpointing.Change], checkpointing.RunProgress]:
        """Read all files of a checkpoint; nothing is changed before all ranks have read theirs."""
        if self._runtime.checkpoints.load_hooks:
            source.agree()
        if not source.is_readable:
            source.agree()  # raises on all ranks
        try:
            progress = checkpointing.read_progress(source, options)
            changes = accelerator.checkpoint_items.read(self._runtime, source, options, policy)
        except Exception as error:  # of any kind: the other ranks have to know
            source.agree(describe(error))
            raise
        source.agree()
        return changes, progress

    def _go_on_after(
        self, source: checkpointing.CheckpointSource, progress: checkpointing.RunProgress
    ) -> None:
        """Take over what is counted."""
        runtime, project = self._runtime, self._runtime.request.project
        if progress.step is not None:
            self.step = progress.step
        if progress.sync_gradients is not None:
            runtime.gradient_state._set_sync_gradients(progress.sync_gradients)
        for optimizer, updates in zip(runtime.prepared.optimizers, progress.updates, strict=False):
            optimizer.num_updates = updates
        accelerator.forget_gradients(runtime)
        step_clock.follow_anew()
        step = max(progress.updates, default=0)
        folder = str(source.folder)
        run_records.append(Checkpoint(time=time.time(), event="loaded", path=folder, step=step))
        for model, order in zip(runtime.prepared.models, progress.gradient_order, strict=False):
            if runtime.prepared.optimizers and not source.resized:
                runtime.strategy.adopt_gradient_order(model, order)
        number = checkpointing.retention.number_of(source.folder.name)
        if number is not None and project.automatic_checkpoint_naming:
            project.iteration = number + 1


def _types(objects: Iterable[object]) -> list[str]:
    return [type(obj).__name__ for obj in objects]


def _no_folder(method: str, purpose: str, argument: str) -> ConfigurationError:
    return ConfigurationError(
        f"{method}() has no folder to {purpose}. Pass {argument}, or number checkpoints: "
        "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
    )


def _numbered_folder(project: plugins.ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming needs a folder: ProjectConfiguration(project_dir=...)."
        )
    return Path(project.project_dir).expanduser() / CHECKPOINTS
