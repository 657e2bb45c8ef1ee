"""Engine, wrappers, placeholders and checkpoints for models that Megatron-LM trains.

`prepare` returns the engine instead of the model, and the wrappers instead of optimizer and scheduler. A call
of the engine is a whole training step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError, wrong_value
from accelerate.checkpointing import Change, CheckpointReader, Part, Payload, Stage, files_under
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import Topology, step_clock
from accelerate.strategies.base import payloads_of_engine
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.data import (
    Batch,
    BatchShape,
    LossLog,
    broadcast_batch,
    broadcast_outputs,
    combine_reports,
)
from accelerate.strategies.megatron.steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
from accelerate.strategies.session import Kind

logger = get_logger(__name__)


class MegatronEngine(nn.Module):
    """Module that trains and evaluates with the pipeline schedules of Megatron-LM.

    In training mode, a call runs the forward and backward of all micro-batches, clips gradients, and steps
    optimizer and scheduler. It is called on all ranks.

    Args:
        accelerator: Has `state.megatron_lm_plugin`.
        model: The model chunks of this rank.
        optimizer: The optimizer of Megatron-LM.
        scheduler: The scheduler of Megatron-LM.

    Attributes:
        iteration: Number of training steps so far.
        grad_norm: Norm of the gradients of the last step before clipping, or None if it was not computed.
    """

    def __init__(self, accelerator: Any, model: list[nn.Module], optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.args = library.get_args()
        self.module = list(model)
        self.parts = nn.ModuleList(model)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.device: torch.device = accelerator.device
        self.shape = BatchShape(self.args)
        self.train_step_handler = _build_train_step(accelerator, self.args)
        self.optimizer.skipped_iter = False
        # Megatron-LM may have loaded a checkpoint that its own arguments name.
        self.iteration = self.args.iteration = int(getattr(self.args, "iteration", None) or 0)
        self.grad_norm: float | None = None
        operations = getattr(self.args, "num_floating_point_operations_so_far", None)
        self.num_floating_point_operations_so_far = operations or 0
        self.total_loss_dict: dict[str, Any] = {}
        self.eval_total_loss_dict: dict[str, Any] = {}
        self.report_memory_flag = True
        self.module_config = self.get_module_config()
        self._losses = LossLog(self.args)
        self._groups = library.core("parallel_state")
        self._utils = library.training("utils")
        self._run = library.core("pipeline_parallel").get_forward_backward_func()
        count = library.training("training").num_floating_point_operations
        self._operations: int = count(self.args, self.args.global_batch_size)

    @property
    def base_model(self) -> nn.Module:
        """The first model chunk of this rank."""
        return self.module[0]

    def get_module_config(self) -> Any:
        """Returns the configuration of the model, with the functions that the schedules call."""
        config = library.core("utils").get_model_config(self.module[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.timers = library.training("global_vars").get_timers()
        config.finalize_model_grads_func = library.core("distributed").finalize_model_grads

        # A field of the configuration, the method of the chunks for it, and the arguments that enable it.
        for field, method, flags in (
            ("no_sync_func", "no_sync", ("overlap_grad_reduce",)),
            ("grad_sync_func", "start_grad_sync", ("overlap_grad_reduce", "align_grad_reduce")),
            ("param_sync_func", "start_param_sync", ("overlap_param_gather", "align_param_gather")),
        ):
            if all(getattr(self.args, flag, False) for flag in flags):
                methods = [getattr(chunk, method) for chunk in self.module]
                setattr(config, field, methods[0] if len(methods) == 1 else methods)
        return config

    def train(self, mode: bool = True) -> MegatronEngine:
        """Sets training or evaluation mode, and logs the losses of the evaluation when it ends.

        Args:
            mode: True for training mode.
        """
        if mode and getattr(self, "eval_total_loss_dict", None):
            self.log_eval_results()
        super().train(mode)
        return self

    def get_batch_data_iterator(self, batch_data: Batch) -> tuple[Any, int]:
        """Returns the data iterators for the schedules, and the number of micro-batches.

        Args:
            batch_data: Tensors by name, with one row per sample. They are the same on all ranks of a model
                replica.

        Raises:
            ConfigurationError: The batch is empty.
        """
        batch = broadcast_batch(batch_data, self.device)
        if not batch:
            fix = "Call it with those of a batch by name: model(**batch)"
            raise wrong_value("batch", batch_data, "the model was called without tensors", fix)
        batches = self.shape.split(self.shape.pad(batch))
        iterators = [iter(batches) for _ in self.module]  # one for each model chunk
        return iterators if len(iterators) > 1 else iterators[0], len(batches)

    def train_step(self, **batch_data: Tensor) -> tuple[dict[str, Any], bool, float | None, Any]:
        """Runs all micro-batches of a batch, and steps optimizer and scheduler.

        Args:
            **batch_data: Tensors with one row per sample.

        Returns:
            The report of the last pipeline stage (empty on other stages), whether the step was skipped
            because of non-finite gradients, the norm of the gradients, and the number of zero gradients if
            it is counted.
        """
        for chunk in self.module:
            chunk.zero_grad_buffer()  # type: ignore[operator]  # of Megatron-LM's wrapper
        self.optimizer.zero_grad()
        report, number = self._forward_backward(batch_data, forward_only=False)
        successful, norm, zeros = self.optimizer.step()
        successful = self._utils.logical_and_across_model_parallel_group(successful)
        norm = self._utils.reduce_max_stat_across_model_parallel_group(norm)
        if successful:
            self.scheduler.step(increment=number * self.args.micro_batch_size * self.args.data_parallel_size)
        return report, not successful, norm, zeros

    def eval_step(self, **batch_data: Tensor) -> dict[str, Any]:
        """Runs the forward of all micro-batches of a batch.

        Args:
            **batch_data: Tensors with one row per sample.

        Returns:
            The report of the last pipeline stage, which is empty on other stages.
        """
        with torch.no_grad():
            return self._forward_backward(batch_data, forward_only=True)[0]

    def _forward_backward(self, batch_data: Batch, *, forward_only: bool) -> tuple[dict[str, Any], int]:
        data, number = self.get_batch_data_iterator(batch_data)
        reports = self._run(
            forward_step_func=self.train_step_handler.forward_step,
            data_iterator=data,
            model=self.module if len(self.module) > 1 else self.module[0],
            num_microbatches=number,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            decoder_seq_length=getattr(self.args, "decoder_seq_length", None),
            forward_only=forward_only,
        )
        return combine_reports(reports, self._groups), number

    def forward(self, **batch_data: Tensor) -> Any:
        """Runs a training step, or evaluates a batch, depending on the mode.

        Called on all ranks.

        Args:
            **batch_data: Tensors with one row per sample.

        Returns:
            An object with `loss`, the mean over all data-parallel ranks, and `logits` if the plugin has
            `return_logits`. A tensor or a tuple of both if the model is configured without `return_dict`. The
            result is the same on all ranks of a model replica.
        """
        if self.training:
            report, skipped, self.grad_norm, zeros = self.train_step(**batch_data)
            self.optimizer.skipped_iter = skipped
            self.iteration += 1
            self.args.iteration = self.iteration
            self.args.consumed_train_samples += self.args.global_batch_size
            self.num_floating_point_operations_so_far += self._operations
            self.total_loss_dict = self._losses.log_step(self, report, zeros)
        else:
            report = self.eval_step(**batch_data)
            self._losses.add(self.eval_total_loss_dict, report)
        loss, logits = broadcast_outputs(report, self._groups, self.device, self.args.return_logits)
        if not self.args.model_return_dict:
            return loss if logits is None else (loss, logits)
        return self.train_step_handler.model_output_class(loss=loss, logits=logits)

    def log_eval_results(self) -> None:
        """Logs the means of the evaluation losses since the last call, and their perplexity.

        Called on all ranks.
        """
        self._losses.log_evaluation(self.iteration, self.eval_total_loss_dict)
        self.eval_total_loss_dict = {}

    def save_checkpoint(self, output_dir: str | Path) -> None:
        """Saves model, optimizer, scheduler and random generators in the format of Megatron-LM.

        Called on all ranks.

        Args:
            output_dir: Folder of the checkpoint.
        """
        self.args.save = str(output_dir)
        library.training("checkpointing").save_checkpoint(
            self.iteration,
            self.module,
            self.optimizer,
            self.scheduler,
            num_floating_point_operations_so_far=self.num_floating_point_operations_so_far,
        )

    def load_checkpoint(self, input_dir: str | Path) -> None:
        """Loads a checkpoint of `save_checkpoint`.

        Called on all ranks.

        Args:
            input_dir: Folder of the checkpoint.

        Raises:
            CheckpointError: The folder has no checkpoint.
        """
        checkpointing = library.training("checkpointing")
        if not checkpointing.checkpoint_exists(str(input_dir)):
            raise CheckpointError(
                f"{input_dir} holds no checkpoint of Megatron-LM. Choose a folder that save_checkpoint or "
                "save_state of a run with Megatron-LM has written."
            )
        self.args.load = str(input_dir)
        # Megatron-LM loads only if no samples have been read, and adds the steps to those of the scheduler.
        for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
            setattr(self.args, name, 0)
        self.scheduler.num_steps = 0
        iteration, operations = checkpointing.load_checkpoint(self.module, self.optimizer, self.scheduler)
        self.iteration = self.args.iteration = iteration
        self.num_floating_point_operations_so_far = operations
        if self.args.fp16 and iteration == 0:
            self.optimizer.reload_model_params()


def _build_train_step(accelerator: Any, args: Namespace) -> AbstractTrainStep:
    """Returns the custom train step of the plugin, or the one of the model family."""
    plugin = accelerator.state.megatron_lm_plugin
    custom = plugin.custom_train_step_class
    step: AbstractTrainStep
    if custom is None:
        kinds: dict[str, Any] = {"bert": BertTrainStep, "gpt": GPTTrainStep, "t5": T5TrainStep}
        step = kinds[args.model_type_name](accelerator, args)
    else:
        given = (accelerator, args) if "accelerator" in signature(custom).parameters else (args,)
        step = custom(*given, **(plugin.custom_train_step_kwargs or {}))
    return step


FOLDER = "megatron"
"""Name of the folder of Megatron-LM in a checkpoint."""


@dataclass(frozen=True)
class MegatronPart(Part):
    """Model, optimizer and scheduler in a checkpoint, in the format of Megatron-LM."""

    engine: Any
    topology: Topology
    folder: Path | None = None

    def collect(self, writes_common: bool = True) -> list[Payload]:
        """Writes the files of Megatron-LM on all ranks, and returns those that this rank checksums."""
        assert self.folder is not None
        self.engine.save_checkpoint(self.folder / FOLDER)
        names = files_under(self.folder / FOLDER)
        return payloads_of_engine([f"{FOLDER}/{name}" for name in names], self.topology)

    def read(self, reader: CheckpointReader) -> Change:
        """Returns the change that loads the files of Megatron-LM on all ranks."""

        def apply() -> None:
            with reader.error_context(FOLDER, "engine"):
                self.engine.load_checkpoint(reader.folder / FOLDER)
            reader.confirm()

        if not (reader.folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{reader.folder} holds no {FOLDER}, in which Megatron-LM keeps model and optimizer. It was "
                "saved by a run without Megatron-LM: choose another checkpoint."
            )
        return Change(apply, f"Megatron-LM's engine ({FOLDER})", stage=Stage.COLLECTIVE)


class MegatronLMDummyScheduler:
    """Placeholder in `prepare` for the scheduler that Megatron-LM builds.

    Args:
        optimizer: The optimizer of the scheduler.
        total_num_steps: Number of training steps, counted in batches of one rank.
        warmup_num_steps: Number of steps of the linear warm-up, counted in batches of one rank.
        **kwargs: Stored for scripts that read them, without effect.
    """

    placeholder_for: ClassVar[Kind] = Kind.SCHEDULER
    built_by: ClassVar[tuple[str, str]] = ("Megatron-LM", "megatron_lm_plugin=MegatronLMPlugin(...)")

    def __init__(
        self, optimizer: object, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Optimizer of Megatron-LM, which a call of the engine steps and whose gradients it clears."""

    belongs_to_engine: bool = True

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing, because the engine has done it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Counts the step that the engine has run."""
        updates = self.num_updates
        step_clock.before_step(self)
        self.num_updates += not self.step_was_skipped
        step_clock.after_step(self, self.num_updates - updates)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because of non-finite gradients."""
        return bool(getattr(self.optimizer, "skipped_iter", False))


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Scheduler of Megatron-LM, which a call of the engine steps.

    Args:
        scheduler: The scheduler of Megatron-LM.
        optimizers: The prepared optimizer of the scheduler.
    """

    belongs_to_engine: bool = True

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because the engine has done it."""

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizers[0].param_groups]
