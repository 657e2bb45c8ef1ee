"""Training by Megatron-LM: its models, its optimizer, its schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate.base import ConfigurationError, DistributedType, PreparationError, wrong_value
from accelerate.checkpointing import Part
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision import Precision
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Fill, Parameters, Strategy
from accelerate.strategies.bundle import Bundle, Kind, mark_prepared
from accelerate.strategies.megatron import initialize as starting
from accelerate.strategies.megatron.data import (
    MegatronLMDummyDataLoader,
    RankGrid,
    prepare_data_loader,
    with_batches_of,
)
from accelerate.strategies.megatron.engine import (
    MegatronEngine,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    MegatronPart,
)
from accelerate.strategies.megatron.planning import plan
from accelerate.strategies.session import Context

logger = get_logger(__name__)


class MegatronLM(Strategy):
    """Megatron-LM builds a model like the user's, with an optimizer like the user's, and trains it."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM

    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engine: MegatronEngine | None = None
        self.grid: RankGrid | None = None
        self.backward: Callable[..., None] = _done_by_engine

    def choose_precision(self) -> Precision:
        """Return the null format: Megatron-LM has its own."""
        return Precision(self.context.mixed_precision)

    @property
    def plugin(self) -> Any:
        """The user's plugin: a live object, read when a run is prepared."""
        return AcceleratorState().megatron_lm_plugin

    @property
    def loader_mesh(self) -> Any:
        """Which ranks share a batch, as Megatron-LM has grouped them."""
        return self.grid

    # Prepare

    def check(self, bundle: Bundle) -> None:
        """Refuse what Megatron-LM cannot train, with all problems in one message."""
        if self.engine is not None:
            self._check_later(bundle)
            return
        problems = plan(
            self.plugin,
            bundle,
            self.context.topology.size,
            self.context.mixed_precision,
            self.context.gradients.num_steps,
        )
        if problems:
            listed = "".join(f"\n  - {problem.rstrip('.')}." for problem in problems)
            raise PreparationError(f"Megatron-LM cannot train this run, {len(problems)} reasons:{listed}")

    def _check_later(self, bundle: Bundle) -> None:
        if bundle.models or bundle.optimizers:
            raise PreparationError(
                "Megatron-LM trains one model with one optimizer in a process, and has them already. Prepare "
                "everything in one call."
            )

    def prepare(self, bundle: Bundle) -> Bundle:
        """Start Megatron-LM and put what it has built in the places of the user's objects."""
        preparer = self.session.preparer
        if self.engine is None:
            starting.initialize(preparer)
            self.grid = RankGrid()
            self.engine = MegatronEngine(preparer, *starting.prepare_model_optimizer_scheduler(preparer))
        bundle.replace(Kind.LOADER, preparer.prepare_data_loader)
        _replace_stand_ins(bundle, preparer)
        bundle.replace(Kind.MODEL, preparer.prepare_model)
        bundle.replace(Kind.OPTIMIZER, preparer.prepare_optimizer)
        scheduler = MegatronLMSchedulerWrapper(self.engine.scheduler, bundle.optimizers)
        bundle.replace(Kind.SCHEDULER, lambda _, __: preparer.prepare_scheduler(scheduler))
        return bundle

    def _engine(self) -> MegatronEngine:
        if self.engine is None:
            raise PreparationError(
                "Megatron-LM prepares model, optimizer, scheduler and loaders together: pass them to one "
                "call of `prepare`."
            )
        return self.engine

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader whose batches have all micro-batches of a step."""
        self._engine()
        return with_batches_of(loader, self.plugin.micro_batch_size * self.plugin.num_micro_batches)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that comes without its optimizer."""
        self._engine()

    def prepare_model(self, model: nn.Module, *, place: bool, evaluation: bool) -> nn.Module:
        """Return the engine, which has a model like the user's, with weights of its own."""
        logger.warning_once(
            "Megatron-LM builds a model like the one that was passed, and its weights are new: to start from "
            "other weights, convert them to a checkpoint of Megatron-LM and call `load_checkpoint`."
        )
        return self._engine()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, place: bool) -> AcceleratedOptimizer:
        """Return Megatron-LM's optimizer."""
        return MegatronLMOptimizerWrapper(self._engine().optimizer)

    def unwrap(self, model: nn.Module, *, keep_fp32: bool = True, keep_compiled: bool = True) -> nn.Module:
        """Return the engine itself: there is no module of the user's in it."""
        return model

    # Step

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Refuse: all ranks take part in each step."""
        raise ConfigurationError(
            "join_uneven_inputs does not work with Megatron-LM: all processes take part in each step. Leave "
            "even_batches on."
        )

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the last step, clipped as the plugin says; NaN before the first one."""
        limit = self.plugin.gradient_clipping
        if max_norm != limit:
            logger.warning_once(
                f"Megatron-LM clips gradients by itself, to gradient_clipping={limit} of MegatronLMPlugin: "
                f"max_norm={max_norm} has no effect."
            )
        norm = self._engine().grad_norm
        return torch.tensor(math.nan) if norm is None else torch.as_tensor(norm)

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        """Refuse: gradients are gone when a step is done."""
        reason = "Megatron-LM clips the norm of gradients, not their values"
        raise wrong_value("clip_value", clip_value, reason, "Set gradient_clipping of MegatronLMPlugin")

    # Save and end

    def engine_part(self, index: int, model: nn.Module, folder: Path | None = None) -> Part | None:
        """Return what lets Megatron-LM save and load."""
        return MegatronPart(self._engine(), self.context.topology, folder)

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        """Refuse: the model is sharded in Megatron-LM's own form."""
        raise _in_parts("load_state_dict", "load_checkpoint of the prepared model")

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Refuse: the model is sharded in Megatron-LM's own form."""
        raise _in_parts("A whole state", "save_checkpoint of the prepared model, or save_state")

    def release(self) -> None:
        """Let go of the engine; Megatron-LM's groups stay open, as they are the process's."""
        self.engine = None


def _replace_stand_ins(bundle: Bundle, preparer: Any) -> None:
    """Replace the stand-ins of loaders by Megatron-LM's loaders: training, validation, test."""
    places = [i for i, obj in enumerate(bundle.objects) if isinstance(obj, MegatronLMDummyDataLoader)]
    if not places:
        return
    loaders = prepare_data_loader(preparer, bundle.objects[places[0]])
    for place, loader in zip(places, loaders, strict=False):
        bundle.objects[place] = mark_prepared(loader)


def _in_parts(what: str, instead: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} is not available under Megatron-LM, whose models are sharded over all processes. Use "
        f"{instead}; Megatron-LM's own tools convert its checkpoints."
    )


def _done_by_engine(loss: Tensor, **kwargs: Any) -> None:
    """Do nothing: the call of the model was a whole step."""
