"""Wrappers, placeholders and checkpoints of a DeepSpeed engine, its optimizer and its scheduler.

Training scripts pass the placeholders to `prepare` and call the wrappers that it returns. The strategy uses
`EnginePart` for checkpoints, and `full_state_dict` and `gathered_parameters` for whole weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelerate import hooks
from accelerate.base import MODEL_NAME, CheckpointError, ConfigurationError, wrong_value
from accelerate.checkpointing import Change, CheckpointReader, Part, Payload, Stage, files_under, number
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import Topology, step_clock
from accelerate.strategies.base import payloads_of_engine
from accelerate.strategies.session import Kind

logger = get_logger(__name__)

_DEEPSPEED = ("DeepSpeed", "deepspeed_plugin=DeepSpeedPlugin(...)")


class DeepSpeedEngineWrapper:
    """Runs the backward passes and the optimizer steps of an engine.

    `backward` runs the step after the last micro-batch. With the `Accelerator`, which calls
    `compute_gradients`, the step runs when the training loop calls `clip_grad_norm_` or `optimizer.step()`.

    Args:
        engine: The engine that `deepspeed.initialize` returned.

    Attributes:
        is_step_pending: Whether gradients are complete and the step has not run yet.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.is_step_pending = False

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Computes gradients, and runs the step if they are complete.

        Args:
            loss: 0-d tensor, which the engine divides by its accumulation steps.
            sync_gradients: Whether this is the last micro-batch of the step.
            **kwargs: Passed to the `backward` of the engine.
        """
        self.compute_gradients(loss, sync_gradients, **kwargs)
        self.finish_step()

    def compute_gradients(self, loss: Tensor, sync_gradients: bool, **kwargs: Any) -> None:
        """Computes gradients without running the step."""
        self.finish_step()
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        self.is_step_pending = sync_gradients

    def finish_step(self) -> None:
        """Runs the step if it is pending."""
        if self.is_step_pending:
            self.is_step_pending = False
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """Returns the global norm of the gradients of the last step, as a number."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Runs the pending step with clipped gradients, and returns their norm before clipping.

        DeepSpeed clips during the step, by the 2-norm.

        Args:
            max_norm: Largest norm, or infinity to clip nothing. A limit in DeepSpeed's configuration takes
                precedence.
            norm_type: 2.

        Returns:
            A 0-d tensor, which is NaN before the first step.
        """
        if float(norm_type) != 2.0:
            raise wrong_value("norm_type", norm_type, "DeepSpeed clips by the 2-norm", "Leave it at 2")
        if self.is_step_pending:
            limit = self._limit(float(max_norm))
            if not hasattr(self.engine.optimizer, "clip_grad"):  # float32 without ZeRO
                return self._clip_gradients(limit)
            self.engine.optimizer.clip_grad = limit
            self.finish_step()
        norm = self.get_global_grad_norm()
        return torch.tensor(math.nan if norm is None else float(norm))

    def _limit(self, max_norm: float) -> float:
        """Returns the limit of the configuration or else `max_norm`, or 0 for no clipping."""
        configured = float(self.engine.config.get("gradient_clipping") or 0.0)
        if configured and math.isfinite(max_norm) and max_norm != configured:
            logger.warning_once(
                f"clip_grad_norm_ was called with max_norm={max_norm}, and DeepSpeed's configuration has "
                f"gradient_clipping={configured}, which takes precedence. Set it to 'auto' to use max_norm."
            )
        return configured or (max_norm if math.isfinite(max_norm) else 0.0)

    def _clip_gradients(self, limit: float) -> Tensor:
        """Clips gradients before the step, for an engine that keeps whole gradients in its parameters."""
        parameters = list(self.engine.module.parameters())
        norm: Tensor = torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)
        config = self.engine._config
        configured = config.gradient_clipping
        config.gradient_clipping = 0.0  # DeepSpeed's default is 1
        self.finish_step()
        config.gradient_clipping = configured
        return norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """Optimizer of an engine, which runs the steps and clears the gradients.

    Args:
        optimizer: The optimizer of an engine.

    Attributes:
        run_step: Runs the pending step of the engine. None if the engine steps in `backward`.
    """

    belongs_to_engine = True  # the engine saves and loads it

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.run_step: Callable[[], None] | None = None
        self.__has_overflow__ = hasattr(self.optimizer, "overflow")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing, because the engine clears gradients in its step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the pending step of the engine, or does nothing while gradients accumulate.

        Args:
            closure: None, because an engine supports no closure.
        """
        if closure is not None:
            raise wrong_value("closure", closure, "DeepSpeed's engine steps without one", "Leave it out")
        self.record_pass()
        if self.gradient_state.sync_gradients:
            updates = self.num_updates
            step_clock.before_step(self)
            self._observers.before_step(self)
            if self.run_step is not None:
                self.run_step()
            self.num_updates += not self.step_was_skipped
            if self.num_updates != updates:
                self._observers.after_update(self)
            step_clock.after_step(self, self.num_updates - updates)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because a gradient was infinite or NaN."""
        return bool(self.__has_overflow__ and self.optimizer.overflow)  # type: ignore[attr-defined]


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """Scheduler of an engine, which steps it.

    Args:
        scheduler: The scheduler of an engine.
        optimizers: The prepared optimizers of the scheduler.
    """

    belongs_to_engine = True  # the engine saves and loads it

    def __init__(
        self,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
    ) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, because the engine steps the scheduler."""


class DummyOptim:
    """Placeholder in `prepare` for the optimizer of DeepSpeed's configuration.

    Args:
        params: Parameters or parameter groups to train.
        lr: Learning rate, if the configuration has "auto".
        weight_decay: Weight decay, if the configuration has "auto".
        **kwargs: Other values for "auto", such as `betas`.
    """

    placeholder_for: ClassVar[Kind] = Kind.OPTIMIZER
    built_by: ClassVar[tuple[str, str]] = _DEEPSPEED

    def __init__(self, params: object, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        """Raises an error with a fix when the placeholder is used as an optimizer."""
        raise AttributeError(
            f"DummyOptim has no {name}: DeepSpeed builds the optimizer in `prepare`. For a scheduler of "
            "torch pass DummyScheduler(optimizer, lr_scheduler_callable=...) to `prepare`, which builds it."
        )


class DummyScheduler:
    """Placeholder in `prepare` for the scheduler of DeepSpeed's configuration.

    Args:
        optimizer: The optimizer of the scheduler.
        total_num_steps: Total number of steps, if the configuration has "auto". They are counted as for any
            prepared scheduler.
        warmup_num_steps: Number of warm-up steps, if the configuration has "auto".
        lr_scheduler_callable: Builds the scheduler for an optimizer, if the configuration has none.
        **kwargs: Other values for "auto", such as `warmup_min_lr`.
    """

    placeholder_for: ClassVar[Kind] = Kind.SCHEDULER
    built_by: ClassVar[tuple[str, str]] = _DEEPSPEED

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


UNIVERSAL = "_universal"
"""Suffix of the folder with the universal checkpoint of an engine."""


@dataclass(frozen=True)
class EnginePart(Part):
    """Model, optimizer and scheduler of one engine in a checkpoint.

    DeepSpeed writes them to a folder of their own, in its own format.
    """

    index: int
    engine: Any
    topology: Topology
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The name of the folder, which is a tag of DeepSpeed."""
        return number(MODEL_NAME, self.index, "")

    def collect(self, writes_common: bool = True) -> list[Payload]:
        """Writes the files of DeepSpeed on all ranks, and returns those that this rank checksums."""
        assert self.folder is not None
        if self.engine.zero_nvme_offload_optimizer():
            logger.warning_once(
                "DeepSpeed saves optimizer states on NVMe and does not restore them: this checkpoint will "
                "not load. Keep them on the CPU (offload_optimizer_device='cpu') in runs that are resumed."
            )
        first = self.index == 0
        before = set(files_under(self.folder))
        self.engine.save_checkpoint(str(self.folder), tag=self.name, save_latest=first)
        own = f"{self.name}/"
        written = [name for name in files_under(self.folder) if name not in before or name.startswith(own)]
        return payloads_of_engine(written, self.topology)

    def read(self, reader: CheckpointReader) -> Change:
        """Returns the change that loads the files of DeepSpeed on all ranks."""
        if self.engine.zero_nvme_offload_optimizer():
            raise CheckpointError(
                f"{reader.folder / self.name} cannot be loaded with optimizer states on NVMe, which "
                "DeepSpeed does not restore: it would step with new ones. Keep them on the CPU "
                "(offload_optimizer_device='cpu') in runs that are resumed; parameters may stay on NVMe."
            )
        is_universal = self.engine.load_universal_checkpoint()
        tag = self._find_universal(reader.folder) if is_universal else self._find_sharded(reader.folder)

        def apply() -> None:
            strict = reader.model_kwargs.get("strict", True)
            with reader.error_context(tag, "engine"):
                path, _ = self.engine.load_checkpoint(str(reader.folder), tag=tag, load_module_strict=strict)
                if path is None:
                    raise CheckpointError(f"DeepSpeed found nothing to load in {reader.folder / tag}")
            reader.confirm()

        return Change(apply, f"DeepSpeed's engine ({tag})", stage=Stage.COLLECTIVE)

    def _find_universal(self, folder: Path) -> str:
        """Returns the tag of the universal checkpoint, beside the sharded one or instead of it."""
        tags = (f"{self.name}{UNIVERSAL}", self.name)
        existing = next((tag for tag in tags if (folder / tag / "zero").is_dir()), None)
        if existing is None:
            raise CheckpointError(
                f"{folder} holds no universal checkpoint, which checkpoint.load_universal in DeepSpeed's "
                f"configuration requires. Create it: {self._conversion(folder)}"
            )
        return existing

    def _conversion(self, folder: Path) -> str:
        """Returns the command that creates the universal checkpoint."""
        path = folder / self.name
        return (
            f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {path} "
            f"--output_folder {path}{UNIVERSAL}"
        )

    def _find_sharded(self, folder: Path) -> str:
        """Returns the tag of the sharded checkpoint, which must have the world size of this run."""
        if not (folder / self.name).is_dir():
            raise CheckpointError(
                f"{folder} holds no {self.name}, in which DeepSpeed keeps an engine. It was saved "
                "by a run without DeepSpeed, or with fewer models: choose another checkpoint, or load its "
                "weights into the model before `prepare`."
            )
        # one file of optimizer states per rank
        shards = len(list((folder / self.name).glob("*zero_pp_rank_*_optim_states.pt")))
        if shards in (0, self.topology.size) or self.engine.zero_elastic_checkpoint():
            return self.name
        raise CheckpointError(
            f"{folder / self.name} was saved by {shards} processes, over which ZeRO shards optimizer "
            f"states, and this run has {self.topology.size}. Start {shards}; or convert it to a universal "
            f"checkpoint with `{self._conversion(folder)}`, and set checkpoint.load_universal to true in "
            "DeepSpeed's configuration."
        )


def full_state_dict(engine: Any) -> dict[str, Any]:
    """Returns the state dict of the model of an engine on the CPU, with shards gathered on rank 0.

    Called on all ranks.
    """
    if engine.zero_optimization_partition_weights():
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "The model is sharded (ZeRO stage 3), and DeepSpeed's configuration does not let it "
                "be gathered. Set zero3_save_16bit_model=True, or "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true there; or save shards "
                "with `save_state`, and merge them with the zero_to_fp32.py in the checkpoint."
            )
        return dict(engine._zero3_consolidated_16bit_state_dict() or {})
    if getattr(engine, "autotp_size", int)() > 1:
        return dict(engine._consolidated_16bit_state_dict() or {})
    return copy_to_cpu(engine.module.state_dict())


def whole_weights(engine: Any) -> tuple[dict[str, Any], Callable[[Any], Tensor]]:
    """Returns the weights of the model of an engine, and a function that gathers one of them on all ranks.

    Called on all ranks.
    """
    if getattr(engine, "autotp_size", int)() > 1:
        raise ConfigurationError(
            "stream_weights does not work with tensor parallelism by DeepSpeed (autotp_size), which gathers "
            "all layers together. Call get_state_dict."
        )
    state = engine.module.state_dict(keep_vars=True)
    partitioned = {
        id(value): hooks.StoredWeight(torch.Size(value.ds_shape), value.dtype, partial(_gather, value))
        for value in state.values()
        if hasattr(value, "ds_id")
    }
    return {name: partitioned.get(id(value), value) for name, value in state.items()}, hooks.read_weight


def _gather(parameter: nn.Parameter) -> Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()  # DeepSpeed frees the gathered one


def copy_to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict with a copy of each tensor on the CPU, in which tied tensors stay tied.

    The parameters of an engine are views of one buffer, which would otherwise be saved with each of them.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_of(tensor: object) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.detach().to("cpu", copy=True)
        return copies[memory]

    return {name: copy_of(tensor) for name, tensor in state.items()}


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """Gathers all parameters inside the block, where a forward needs no other rank."""
    shards = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not shards:
        yield
        return
    import deepspeed

    offload: Any = getattr(model.optimizer, "parameter_offload", model.optimizer)
    with deepspeed.zero.GatheredParameters(shards):
        for shard in shards:
            shard.ds_active_sub_modules.clear()  # type: ignore[attr-defined]  # DeepSpeed's
        offload._remove_module_hooks()
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()
