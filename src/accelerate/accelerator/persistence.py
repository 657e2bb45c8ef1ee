"""Checkpoints of a run, with models, optimizers, schedulers, loaders and random generators.

`Accelerator.save_state`, `load_state`, `save_model` and related methods delegate to `RunCheckpoints`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate import accelerator, checkpointing, hooks, plugins
from accelerate.accelerator.accumulation import Accumulation
from accelerate.accelerator.runtime import Runtime
from accelerate.base import (
    CheckpointError,
    ConfigurationError,
    as_builtin,
    describe,
    progress_bar,
    refuse_path,
)
from accelerate.logging import get_logger
from accelerate.monitoring import SAVING, Checkpoint
from accelerate.state import run_records, step_clock

logger = get_logger(__name__)

Folder = str | os.PathLike[str]

CHECKPOINTS = "checkpoints"
"""Folder of numbered checkpoints in the folder of the project."""


class RunCheckpoints:
    """Saves and loads the state of a run.

    Called on all ranks unless a method says otherwise.

    Args:
        accumulation: Position within a window, which is a part of a checkpoint.
    """

    def __init__(self, runtime: Runtime, accumulation: Accumulation) -> None:
        self._runtime = runtime
        self._accumulation = accumulation
        self._fast: accelerator.fast_saves.FastSaves | None = None
        project = runtime.request.project
        if project.fast_dir is not None:
            durable = _numbered_folder(project) if project.automatic_checkpoint_naming else None
            step = partial(getattr, accumulation, "step")
            save = partial(self._save_state, None, True, None)
            self._fast = accelerator.fast_saves.FastSaves(runtime, self._next_request, step, durable, save)

    # The whole run

    def save_state(self, output_dir: Folder | None, safe_serialization: bool, blocking: bool | None) -> Path:
        """Saves the state of the run, and returns the folder."""
        self._runtime.observers.before_save()
        with step_clock.phase(SAVING):
            return self._save_state(output_dir, safe_serialization, blocking)

    def _save_state(self, output_dir: Folder | None, safe_serialization: bool, blocking: bool | None) -> Path:
        runtime, project = self._runtime, self._runtime.request.project
        checkpoints = runtime.checkpoints
        checkpoints.background.wait()
        request = self._request(output_dir)
        if not runtime.groups.is_leader:
            project.iteration += request.iteration is not None
            return request.target  # all replica groups have the same state
        saver = checkpoints.begin(request)
        staging, request = saver.staging, saver.staging.request
        logger.info(f"Saving current state to {request.target}")
        if request.iteration is not None:
            project.iteration = request.iteration + 1
        try:
            step = self._accumulation.step
            payloads = accelerator.state_items.collect(runtime, staging, step, safe_serialization)
        except Exception as error:
            saver.abort(error)
            raise
        except BaseException:  # an interrupt: no rank may wait for this save
            saver.discard()
            raise
        is_blocking = not project.async_save if blocking is None else blocking
        checkpoints.write(saver, payloads, blocking=is_blocking)
        return request.target

    def wait(self) -> None:
        """Waits until the save in the background is committed, or raises its error."""
        with step_clock.phase(SAVING):
            self._runtime.observers.awaited()
            self._runtime.checkpoints.background.wait()

    @progress_bar("Loading a checkpoint")
    def load_state(
        self,
        input_dir: Folder | None,
        load_kwargs: Mapping[str, Any] | None,
        world_size_policy: checkpointing.WorldSizePolicy,
        load_model_func_kwargs: Mapping[str, Any],
    ) -> None:
        """Loads the state of the run."""
        runtime, began = self._runtime, time.perf_counter()
        checkpointing.loading.check_policy(world_size_policy)
        runtime.observers.before_load_state()
        runtime.checkpoints.background.wait()
        model_kwargs = dict(load_model_func_kwargs)
        device = checkpointing.read_device(model_kwargs.pop("map_location", None))
        options = checkpointing.CheckpointReader(Path(), device, dict(load_kwargs or {}), model_kwargs)
        skipped: list[tuple[checkpointing.CheckpointSource, CheckpointError]] = []
        cause: CheckpointError | None = None
        for source in self._candidates(input_dir, options):
            reader = source.reader(options)
            try:
                changes, progress = self._read(source, reader, world_size_policy)
            except checkpointing.loading.WorldSizeError:
                raise
            except CheckpointError as error:
                skipped.append((source, error))
                cause = error
                continue
            for line in _lines(skipped):
                logger.warning(f"A checkpoint was skipped. {line}.")
            logger.info(f"Loading states from {source.folder}")
            checkpointing.apply_all(changes, partial(source.agree, was_read=False))
            has_scaler = runtime.strategy.precision.scaler is not None
            for line in checkpointing.loaded_lines(
                source.folder, has_scaler, _types(runtime.prepared.custom)
            ):
                logger.info(line)
            self._go_on_after(source, progress, began)
            return
        raise checkpointing.loading.nothing_to_load(input_dir, _lines(skipped)) from cause

    def register(self, objects: Sequence[Any]) -> None:
        """Adds objects that are saved and loaded with the run."""
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

    def add_save_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Adds a function that is called before each save."""
        return self._runtime.checkpoints.add_hook(self._runtime.checkpoints.save_hooks, hook)

    def add_load_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Adds a function that is called before each load."""
        return self._runtime.checkpoints.add_hook(self._runtime.checkpoints.load_hooks, hook)

    # Models and objects

    def save_model(
        self, model: Any, save_directory: Folder, max_shard_size: int | str, safe_serialization: bool
    ) -> None:
        """Saves the weights or averages of a model in files that other libraries read."""
        refuse_path("save_directory", save_directory)
        if any(model is average for average in self._runtime.prepared.averages):
            with nullcontext() if model.is_applied else model.applied():
                self.save_model(model.model, save_directory, max_shard_size, safe_serialization)
            return
        check_values(model, "saved")
        states, is_main = self._runtime.strategy.state, self._runtime.state.is_main_process
        with step_clock.phase(SAVING):
            shards = states.gatherable_weights(model) if safe_serialization else None
            values = () if shards is None else shards[0].values()
            # Tensors of other ranks are described by objects with a dtype.
            if shards and all(isinstance(getattr(value, "dtype", None), torch.dtype) for value in values):
                folder = Path(save_directory)
                checkpointing.save_from_shards(*shards, folder, max_shard_size, writes=is_main)
                return
            state = states.state_dict(model, unwrap=True)
            if is_main:
                checkpointing.save_sharded(state, Path(save_directory), max_shard_size, safe_serialization)

    # Steps of a save and a load

    def _next_request(self) -> checkpointing.Request:
        """Returns a request for the next numbered checkpoint, or for none if checkpoints are not numbered."""
        has_project = self._runtime.request.project.automatic_checkpoint_naming
        return self._request(None if has_project else "generation")

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
            if output_dir not in (None, "", "generation"):
                logger.warning_once(
                    f"save_state({str(output_dir)!r}) saves to a numbered folder of the project, because "
                    "automatic_checkpoint_naming is set. Leave the folder out."
                )
            iteration = project.iteration
            target = _numbered_folder(project) / checkpointing.name_of(iteration)
        loaders = runtime.prepared.loaders
        gradients = runtime.gradient_state
        if not gradients.sync_gradients:
            logger.warning_once(
                "save_state() in the middle of an accumulation window: the accumulated gradients are not "
                "saved, so a run that resumes from this checkpoint differs. Save when `sync_gradients` is "
                "True."
            )
        return checkpointing.Request(
            target,
            session.timeout,
            step=self._accumulation.step,
            epoch=int(getattr(loaders[0], "iteration", 0)) if loaders else 0,
            iteration=iteration,
            keep=project.total_limit if numbered else None,
            custom=_types(runtime.prepared.custom),
            run={
                "sync_gradients": gradients.sync_gradients,
                "num_steps": gradients.num_steps,
                **accelerator.state_items.counters_of(runtime.prepared),
                "gradient_order": [
                    runtime.strategy.state.gradient_order(model) for model in runtime.prepared.models
                ],
            },
        )

    def _candidates(
        self, input_dir: Folder | None, reader: checkpointing.CheckpointReader
    ) -> Iterator[checkpointing.CheckpointSource]:
        runtime, project = self._runtime, self._runtime.request.project
        session = runtime.checkpoints
        run = session.consensus, runtime.state.topology, session.timeout
        if input_dir is not None:
            refuse_path("input_dir", input_dir)
            return checkpointing.loading.open_checkpoint(Path(input_dir).expanduser(), *run)
        durable: Iterator[checkpointing.CheckpointSource] = iter(())
        if project.automatic_checkpoint_naming:
            durable = checkpointing.loading.open_newest(_numbered_folder(project), *run)
        elif self._fast is None:
            raise _no_folder("load_state", "load from", "input_dir")
        return durable if self._fast is None else self._fast.candidates(durable, reader)

    def _read(
        self, source: checkpointing.CheckpointSource, options: checkpointing.CheckpointReader, policy: str
    ) -> tuple[list[checkpointing.Change], checkpointing.RunProgress]:
        """Reads all files of a checkpoint on all ranks, after the load hooks of the user."""
        if self._runtime.checkpoints.load_hooks or policy == "strict" or not source.is_readable:
            source.agree()  # raises on all ranks if a rank cannot read the checkpoint
        checkpointing.loading.check_source(source, self._runtime.state.num_processes, policy)
        try:
            progress = checkpointing.read_progress(source, options)
            changes = accelerator.state_items.read(self._runtime, source, options, policy)
        except Exception as error:  # of any kind, because all ranks raise it
            source.agree(describe(error))
            raise
        source.agree()
        return changes, progress

    def _go_on_after(
        self, source: checkpointing.CheckpointSource, progress: checkpointing.RunProgress, began: float
    ) -> None:
        """Restores the counters of a checkpoint, and records a load that began at a time of the clock."""
        runtime, project = self._runtime, self._runtime.request.project
        if progress.step is not None:
            self._accumulation.step = progress.step
        if progress.sync_gradients is not None:
            runtime.gradient_state._set_sync_gradients(progress.sync_gradients)
        accelerator.state_items.set_counters(runtime.prepared, progress.counters)
        self._accumulation.drop_gradients()
        step = max(progress.counters["updates"], default=0)
        folder, seconds = str(source.folder), time.perf_counter() - began
        run_records.append(
            Checkpoint(time=time.time(), event="loaded", path=folder, step=step, seconds=seconds)
        )
        runtime.observers.checkpointed(folder, step)
        for model, order in zip(runtime.prepared.models, progress.gradient_order, strict=False):
            if runtime.prepared.optimizers and not source.resized:
                runtime.strategy.state.adopt_gradient_order(model, order)
        runtime.observers.loaded(step)
        number = checkpointing.number_of(source.folder.name)
        if number is not None and project.automatic_checkpoint_naming:
            run = {} if source.manifest is None else source.manifest.run
            project.iteration = run.get(checkpointing.NEXT_DURABLE, number + 1)


def check_values(model: nn.Module, verb: str) -> None:
    """Raises an error for a model with parameters that have no values and are not offloaded."""
    is_empty = any(parameter.device.type == "meta" for parameter in model.parameters())
    if is_empty and not hooks.is_any_offloaded(model):
        raise ConfigurationError(
            f"{type(model).__name__} has parameters without values (on the meta device), which cannot be "
            f"{verb}: load its weights first."
        )


def _lines(skipped: Iterable[tuple[checkpointing.CheckpointSource, CheckpointError]]) -> list[str]:
    """Returns the reasons why checkpoints were skipped, except those that were read again."""
    lines = (f"{source.folder}: {error}" for source, error in skipped if not source.was_replaced)
    return list(dict.fromkeys(lines))


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
