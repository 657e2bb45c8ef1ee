"""DeepSpeed's engine, optimizer and scheduler as training loops call them and as checkpoints have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelerate.base import MODEL_NAME, CheckpointError, ConfigurationError, wrong_value
from accelerate.checkpointing import Change, CheckpointReader, Payload, Stage, files_under, number
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import Topology, step_clock
from accelerate.strategies.base import payloads_of_engine
from accelerate.strategies.session import Kind

logger = get_logger(__name__)

_DEEPSPEED = ("DeepSpeed", "deepspeed_plugin=DeepSpeedPlugin(...)")


class DeepSpeedEngineWrapper:
    """One engine: backward passes, and the step that its last backward pass of a window owes.

    The step is taken by `backward` here, and by the training loop's `clip_grad_norm_` or `optimizer.step()`
    where the `Accelerator` calls `compute_gradients`.

    Args:
        engine: as `deepspeed.initialize` returns it.

    Attributes:
        owes_step: whether gradients are complete and no step has been taken yet.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.owes_step = False

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step when they are complete.

        Args:
            loss: 0-d tensor; the engine divides it by its accumulation steps.
            sync_gradients: whether this is the last backward pass of a window.
            **kwargs: passed to the engine's `backward`.
        """
        self.compute_gradients(loss, sync_gradients, **kwargs)
        self.finish_step()

    def compute_gradients(self, loss: Tensor, sync_gradients: bool, **kwargs: Any) -> None:
        """Compute gradients; the step comes later."""
        self.finish_step()
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        self.owes_step = sync_gradients

    def finish_step(self) -> None:
        """Take the step that is owed; nothing when none is."""
        if self.owes_step:
            self.owes_step = False
            self.engine.step()

    def get_global_grad_norm(self) -> Any:
        """Return the norm that the gradients of the last step had over all ranks, as a number."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Take the step that is owed with gradients whose norm is at most `max_norm`; infinity only measures.

        DeepSpeed clips while it steps, by the 2-norm. A norm in its configuration counts instead of
        `max_norm`. Return the norm before clipping; NaN where no step has been taken yet.
        """
        if float(norm_type) != 2.0:
            raise wrong_value("norm_type", norm_type, "DeepSpeed clips by the 2-norm", "Leave it at 2")
        if self.owes_step:
            limit = self._limit(float(max_norm))
            if not hasattr(self.engine.optimizer, "clip_grad"):  # float32 without ZeRO
                return self._clip_gradients(limit)
            self.engine.optimizer.clip_grad = limit
            self.finish_step()
        norm = self.get_global_grad_norm()
        return torch.tensor(math.nan if norm is None else float(norm))

    def _limit(self, asked: float) -> float:
        """Return the largest norm of gradients, 0 for none."""
        configured = float(self.engine.config.get("gradient_clipping") or 0.0)
        if configured and math.isfinite(asked) and asked != configured:
            logger.warning_once(
                f"clip_grad_norm_ was called with max_norm={asked}, and DeepSpeed's configuration has "
                f"gradient_clipping={configured}, which counts. Set it to 'auto' to let max_norm count."
            )
        return configured or (asked if math.isfinite(asked) else 0.0)

    def _clip_gradients(self, limit: float) -> Tensor:
        """Clip the gradients of an engine whose parameters have them, whole, until the step."""
        parameters = list(self.engine.module.parameters())
        norm: Tensor = torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)
        config = self.engine._config
        usual = config.gradient_clipping
        config.gradient_clipping = 0.0  # DeepSpeed's own limit is 1 where none is configured
        self.finish_step()
        config.gradient_clipping = usual
        return norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """DeepSpeed's optimizer: the engine steps, and clears gradients.

    Args:
        optimizer: of an engine.

    Attributes:
        take_step: takes the step that the engine owes; None where the engine steps by itself.
    """

    belongs_to_engine = True
    """Whether the engine saves it and loads it."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.take_step: Callable[[], None] | None = None
        self.__has_overflow__ = hasattr(self.optimizer, "overflow")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients when it steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step that the engine owes; nothing while gradients accumulate.

        Args:
            closure: cannot be called by an engine.
        """
        if closure is not None:
            raise wrong_value("closure", closure, "DeepSpeed's engine steps without one", "Leave it out")
        if self.gradient_state.sync_gradients:
            before, updates = step_clock.begin_step(id(self)), self.num_updates
            if self.take_step is not None:
                self.take_step()
            self.num_updates += not self.step_was_skipped
            step_clock.end_step(before, id(self), self.num_updates - updates, self.num_updates)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient was infinite or not a number."""
        return bool(self.__has_overflow__ and self.optimizer.overflow)  # type: ignore[attr-defined]


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps.

    Args:
        scheduler: of an engine.
        optimizers: the prepared optimizers that it belongs to.
    """

    belongs_to_engine = True

    def __init__(
        self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]
    ) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps it with its optimizer."""


class DummyOptim:
    """A placeholder for the optimizer of DeepSpeed's configuration in `prepare`.

    Args:
        params: parameters, or groups of them, that are trained.
        lr: learning rate, where the configuration has "auto".
        weight_decay: likewise.
        **kwargs: further parameters of the optimizer, likewise, such as `betas`.
    """

    placeholder_for: ClassVar[Kind] = Kind.OPTIMIZER
    built_by: ClassVar[tuple[str, str]] = _DEEPSPEED

    def __init__(self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        """Say what to do where this is taken for an optimizer, by torch's schedulers for example."""
        raise AttributeError(
            f"DummyOptim has no {name}: DeepSpeed builds the optimizer in `prepare`. For a scheduler of "
            "torch pass DummyScheduler(optimizer, lr_scheduler_callable=...) to it, which builds one then."
        )


class DummyScheduler:
    """A placeholder for the scheduler of DeepSpeed's configuration in `prepare`.

    Args:
        optimizer: the optimizer whose learning rate it sets.
        total_num_steps: its length, where the configuration has "auto"; counted like that of any scheduler
            that is prepared.
        warmup_num_steps: likewise.
        lr_scheduler_callable: builds a scheduler for an optimizer, where the configuration has none.
        **kwargs: further parameters of the scheduler, such as `warmup_min_lr`.
    """

    placeholder_for: ClassVar[Kind] = Kind.SCHEDULER
    built_by: ClassVar[tuple[str, str]] = _DEEPSPEED

    def __init__(
        self,
        optimizer: Any,
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
"""What follows the name of an engine's folder for the same in DeepSpeed's universal layout."""


@dataclass(frozen=True)
class EnginePart:
    """Model, optimizer and scheduler of one engine, in a folder of their own, as DeepSpeed lays it out."""

    index: int
    engine: Any
    topology: Topology
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The folder, which DeepSpeed calls a tag."""
        return number(MODEL_NAME, self.index, "")

    def collect(self, writes_common: bool = True) -> list[Payload]:
        """Let DeepSpeed write its files, on all ranks together; return those that this rank seals."""
        assert self.folder is not None
        if self.engine.zero_nvme_offload_optimizer():
            logger.warning_once(
                "DeepSpeed saves optimizer states on NVMe and does not bring them back: this checkpoint will "
                "not load. Keep them on the CPU (offload_optimizer_device='cpu') in runs that are to go on."
            )
        first = self.index == 0
        before = set(files_under(self.folder))
        self.engine.save_checkpoint(str(self.folder), tag=self.name, save_latest=first)
        own = f"{self.name}/"
        written = [name for name in files_under(self.folder) if name not in before or name.startswith(own)]
        return payloads_of_engine(written, self.topology)

    def read(self, reader: CheckpointReader) -> Change:
        """Return what lets DeepSpeed load its files, on all ranks together."""
        if self.engine.zero_nvme_offload_optimizer():
            raise CheckpointError(
                f"{reader.folder / self.name} cannot go on with optimizer states on NVMe, which DeepSpeed "
                "does not bring back: it would step with new ones. Keep them on the CPU "
                "(offload_optimizer_device='cpu') in runs that are to go on; parameters may stay on NVMe."
            )
        find_tag = self._universal if self.engine.load_universal_checkpoint() else self._own
        tag = find_tag(reader.folder)

        def apply() -> None:
            strict = reader.model_kwargs.get("strict", True)
            with reader.error_context(tag, "engine"):
                path, _ = self.engine.load_checkpoint(str(reader.folder), tag=tag, load_module_strict=strict)
                if path is None:
                    raise CheckpointError(f"DeepSpeed found nothing to load in {reader.folder / tag}")
            reader.confirm()

        return Change(apply, f"DeepSpeed's engine ({tag})", stage=Stage.COLLECTIVE)

    def _universal(self, folder: Path) -> str:
        """Return the tag of the universal checkpoint: beside DeepSpeed's own one, or in its place."""
        tags = (f"{self.name}{UNIVERSAL}", self.name)
        existing = next((tag for tag in tags if (folder / tag / "zero").is_dir()), None)
        if existing is None:
            raise CheckpointError(
                f"{folder} holds no universal checkpoint, which checkpoint.load_universal in DeepSpeed's "
                f"configuration asks for. Make one: {self._conversion(folder)}"
            )
        return existing

    def _conversion(self, folder: Path) -> str:
        path = folder / self.name
        return (
            f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {path} "
            f"--output_folder {path}{UNIVERSAL}"
        )

    def _own(self, folder: Path) -> str:
        """Return the tag of DeepSpeed's own checkpoint; refuse shards of another number of processes."""
        if not (folder / self.name).is_dir():
            raise CheckpointError(
                f"{folder} holds no {self.name}, in which DeepSpeed keeps an engine. It was saved "
                "by a run without DeepSpeed, or with fewer models: choose another checkpoint, or load its "
                "weights into the model before `prepare`."
            )
        # Files of optimizer states: one for each process that shares them.
        shards = len(list((folder / self.name).glob("*zero_pp_rank_*_optim_states.pt")))
        if shards in (0, self.topology.size) or self.engine.zero_elastic_checkpoint():
            return self.name
        raise CheckpointError(
            f"{folder / self.name} was saved by {shards} processes, between which ZeRO shares optimizer "
            f"states, and this run has {self.topology.size}. Start {shards}; or turn it into a universal "
            f"checkpoint by `{self._conversion(folder)}`, and set checkpoint.load_universal to true in "
            "DeepSpeed's configuration."
        )


def whole_state(engine: Any) -> dict[str, Any]:
    """Return the state of an engine's model on the CPU, with shards gathered on rank 0; on all ranks."""
    if engine.zero_optimization_partition_weights():
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "The model is sharded (ZeRO stage 3), and DeepSpeed's configuration does not let it "
                "be gathered. Set zero3_save_16bit_model=True, or "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to true there; or save shards "
                "by `save_state`, and join them by the zero_to_fp32.py in the checkpoint."
            )
        return dict(engine._zero3_consolidated_16bit_state_dict() or {})
    if getattr(engine, "autotp_size", int)() > 1:
        return dict(engine._consolidated_16bit_state_dict() or {})
    return copy_tied(engine.module.state_dict())


def copy_tied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with each tensor copied to the CPU; names of one tensor keep sharing one.

    An engine lays parameters side by side in one buffer, of which each would otherwise take the whole.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy_of(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.detach().to("cpu", copy=True)
        return copies[memory]

    return {name: copy_of(tensor) for name, tensor in state.items()}


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """Have whole parameters on each rank inside the block, where forwards need no other rank."""
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
