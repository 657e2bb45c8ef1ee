"""MegatronEngine, which steps a model with its optimizer and scheduler, and the wrappers of those two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError, wrong_value
from accelerate.checkpointing import Change, CheckpointReader, Payload, Stage, files_under
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import Topology, step_clock
from accelerate.strategies.base import payloads_of_engine
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.data import (
    Batch,
    BatchShape,
    Losses,
    combine_reports,
    share_batch,
    share_outputs,
)
from accelerate.strategies.megatron.steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
from accelerate.strategies.session import Kind

logger = get_logger(__name__)


class MegatronEngine(nn.Module):
    """Calls Megatron-LM's schedules: in training, one call is a whole step.

    Such a step runs all micro-batches forward and backward, clips gradients, and steps optimizer and
    scheduler. Called on all ranks.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        model: the parts of the model on this process.
        optimizer: Megatron-LM's.
        scheduler: Megatron-LM's.

    Attributes:
        iteration: steps of training so far.
        grad_norm: norm of the gradients of the last step, before clipping; None where it was not measured.
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
        self.train_step_handler = _build_step(accelerator, self.args)
        self.optimizer.skipped_iter = False
        # Steps and operations of a checkpoint that Megatron-LM has loaded by its own arguments.
        self.iteration = self.args.iteration = int(getattr(self.args, "iteration", None) or 0)
        self.grad_norm: float | None = None
        read = getattr(self.args, "num_floating_point_operations_so_far", None)
        self.num_floating_point_operations_so_far = read or 0
        self.total_loss_dict: dict[str, Any] = {}
        self.eval_total_loss_dict: dict[str, Any] = {}
        self.report_memory_flag = True
        self.module_config = self.get_module_config()
        self._losses = Losses(self.args)
        self._groups = library.core("parallel_state")
        self._utils = library.training("utils")
        self._run = library.core("pipeline_parallel").get_forward_backward_func()
        count = library.training("training").num_floating_point_operations
        self._operations: int = count(self.args, self.args.global_batch_size)

    @property
    def base_model(self) -> nn.Module:
        """The first part of the model on this process."""
        return self.module[0]

    def get_module_config(self) -> Any:
        """Return the configuration of the model, with what the schedules need of optimizer and wrappers."""
        config = library.core("utils").get_model_config(self.module[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.timers = library.training("global_vars").get_timers()
        config.finalize_model_grads_func = library.core("distributed").finalize_model_grads

        # A field of the configuration, the method of the parts that it takes, and the arguments that ask.
        for field, method, flags in (
            ("no_sync_func", "no_sync", ("overlap_grad_reduce",)),
            ("grad_sync_func", "start_grad_sync", ("overlap_grad_reduce", "align_grad_reduce")),
            ("param_sync_func", "start_param_sync", ("overlap_param_gather", "align_param_gather")),
        ):
            if all(getattr(self.args, flag, False) for flag in flags):
                methods = [getattr(part, method) for part in self.module]
                setattr(config, field, methods[0] if len(methods) == 1 else methods)
        return config

    def train(self, mode: bool = True) -> MegatronEngine:
        """Switch to training, or away from it; what was evaluated before is logged first.

        Args:
            mode: whether to train.
        """
        if mode and getattr(self, "eval_total_loss_dict", None):
            self.log_eval_results()
        super().train(mode)
        return self

    def get_batch_data_iterator(self, batch_data: Batch) -> tuple[Any, int]:
        """Return what the schedules read of a batch, and how many micro-batches that is.

        Args:
            batch_data: tensors with one row per sample, by name; the same on all ranks of a copy of the
                model.

        Raises:
            ConfigurationError: there is nothing in it.
        """
        shared = share_batch(batch_data, self.device)
        if not shared:
            fix = "Call it with those of a batch by name: model(**batch)"
            raise wrong_value("batch", batch_data, "the model was called without tensors", fix)
        batches = self.shape.cut(self.shape.fill(shared))
        readers = [iter(batches) for _ in self.module]  # each part of the model reads them
        return readers if len(readers) > 1 else readers[0], len(batches)

    def train_step(self, **batch_data: Tensor) -> tuple[dict[str, Any], bool, float | None, Any]:
        """Run all micro-batches of a batch and step optimizer and scheduler.

        Args:
            **batch_data: tensors with one row per sample.

        Returns:
            What the last stage reports, by name (nothing on others); whether the step was left out because
            gradients were not finite; their norm; how many of them were zero, where that is counted.
        """
        for part in self.module:
            part.zero_grad_buffer()  # type: ignore[operator]  # Megatron-LM's wrapper
        self.optimizer.zero_grad()
        report, number = self._forward_backward(batch_data, forward_only=False)
        successful, norm, zeros = self.optimizer.step()
        successful = self._utils.logical_and_across_model_parallel_group(successful)
        norm = self._utils.reduce_max_stat_across_model_parallel_group(norm)
        if successful:
            self.scheduler.step(increment=number * self.args.micro_batch_size * self.args.data_parallel_size)
        return report, not successful, norm, zeros

    def eval_step(self, **batch_data: Tensor) -> dict[str, Any]:
        """Run all micro-batches of a batch forward.

        Args:
            **batch_data: tensors with one row per sample.

        Returns:
            What the last stage reports, by name; nothing on others.
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
        """Take one step of training, or evaluate one batch; called on all ranks.

        Args:
            **batch_data: tensors with one row per sample.

        Returns:
            An object with `loss`, the mean over all copies of the model, and `logits` where the plugin asks
            for them; the loss alone where the model was configured without `return_dict`. The same on all
            ranks that make up a copy.
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
        loss, logits = share_outputs(report, self._groups, self.device, self.args.return_logits)
        if not self.args.model_return_dict:
            return loss if logits is None else (loss, logits)
        return self.train_step_handler.model_output_class(loss=loss, logits=logits)

    def log_eval_results(self) -> None:
        """Log the mean of all losses evaluated since the last call, and their perplexity; called on all
        ranks."""
        self._losses.log_evaluation(self.iteration, self.eval_total_loss_dict)
        self.eval_total_loss_dict = {}

    def save_checkpoint(self, output_dir: str | Path) -> None:
        """Save model, optimizer, scheduler and generators by Megatron-LM's own function; on all ranks.

        Args:
            output_dir: the folder.
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
        """Load what `save_checkpoint` saved; called on all ranks.

        Args:
            input_dir: the folder.

        Raises:
            CheckpointError: there is no checkpoint in it.
        """
        checkpointing = library.training("checkpointing")
        if not checkpointing.checkpoint_exists(str(input_dir)):
            raise CheckpointError(
                f"{input_dir} holds no checkpoint of Megatron-LM. Choose a folder that save_checkpoint or "
                "save_state of a run with Megatron-LM has written."
            )
        self.args.load = str(input_dir)
        # Megatron-LM loads only where no samples were read, and adds up the steps of schedules.
        for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
            setattr(self.args, name, 0)
        self.scheduler.num_steps = 0
        iteration, operations = checkpointing.load_checkpoint(self.module, self.optimizer, self.scheduler)
        self.iteration = self.args.iteration = iteration
        self.num_floating_point_operations_so_far = operations
        if self.args.fp16 and iteration == 0:
            self.optimizer.reload_model_params()


def _build_step(accelerator: Any, args: Any) -> AbstractTrainStep:
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
"""The folder of Megatron-LM's files in a checkpoint."""


@dataclass(frozen=True)
class MegatronPart:
    """Model, optimizer and scheduler as a part of a checkpoint, in Megatron-LM's own files."""

    engine: Any
    topology: Topology
    folder: Path | None = None

    def collect(self, writes_common: bool = True) -> list[Payload]:
        """Let Megatron-LM write its files, on all ranks together; return those that this rank seals."""
        assert self.folder is not None
        self.engine.save_checkpoint(self.folder / FOLDER)
        names = files_under(self.folder / FOLDER)
        return payloads_of_engine([f"{FOLDER}/{name}" for name in names], self.topology)

    def read(self, reader: CheckpointReader) -> Change:
        """Return what lets Megatron-LM load its files, on all ranks together."""

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
    """A placeholder for a scheduler that Megatron-LM builds, and says how long it runs.

    Args:
        optimizer: the one it is for.
        total_num_steps: steps of the whole training, counted in batches of one process.
        warmup_num_steps: steps over which the learning rate rises first, counted likewise.
        **kwargs: kept, for scripts that look them up.
    """

    placeholder_for: ClassVar[Kind] = Kind.SCHEDULER
    built_by: ClassVar[tuple[str, str]] = ("Megatron-LM", "megatron_lm_plugin=MegatronLMPlugin(...)")

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Megatron-LM's optimizer: a call of the engine has stepped it and cleared its gradients."""

    belongs_to_engine: bool = True

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine has done it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the step that the engine has done."""
        before, updates = step_clock.begin_step(id(self)), self.num_updates
        self.num_updates += not self.step_was_skipped
        step_clock.end_step(before, id(self), self.num_updates - updates, self.num_updates)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients were not finite."""
        return bool(getattr(self.optimizer, "skipped_iter", False))


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Megatron-LM's scheduler: a call of the engine has stepped it.

    Args:
        scheduler: Megatron-LM's.
        optimizers: the prepared one it is for.
    """

    belongs_to_engine: bool = True

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has done it."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizers[0].param_groups]
