"""Strategy for training with Megatron-LM.

`plan_run` writes the sizes of the prepared objects to the plugin and returns all problems. The strategy then
initializes Megatron-LM, which builds its own model, optimizer and scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import ConfigurationError, DistributedType, PreparationError, wrong_value
from accelerate.checkpointing import Part
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.plugins import MegatronLMPlugin, find_wrong_network, find_wrong_sizes, find_wrong_values
from accelerate.precision import Precision
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Parameters, Strategy, keep_none
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.data import (
    MegatronLMDummyDataLoader,
    RankGrid,
    prepare_data_loader,
    refuse_batch_sampler,
    with_batch_size,
)
from accelerate.strategies.megatron.engine import (
    MegatronEngine,
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    MegatronPart,
)
from accelerate.strategies.request import Context
from accelerate.strategies.session import Bundle, Kind, mark_prepared
from accelerate.strategies.state import Fill, StrategyState

logger = get_logger(__name__)


def plan_run(
    plugin: MegatronLMPlugin, bundle: Bundle, processes: int, mixed_precision: str, steps: int
) -> list[str]:
    """Writes the arguments of the prepared objects to the plugin, and returns one line for each problem."""
    problems = [
        *library.find_missing(plugin),
        *find_wrong_values(plugin),
        *find_wrong_sizes(plugin, processes),
    ]
    if steps > 1:
        problems.append(
            f"gradient_accumulation_steps={steps}: Megatron-LM accumulates by itself. Set num_micro_batches "
            "of MegatronLMPlugin instead"
        )
    plugin.set_mixed_precision(mixed_precision)
    problems += _plan_data(plugin, bundle, processes)
    for plan in (_plan_model, _plan_optimizer, _plan_schedule):
        problems += plan(plugin, bundle)
    return problems


def _plan_data(plugin: MegatronLMPlugin, bundle: Bundle, processes: int) -> list[str]:
    loaders, size = bundle.of(Kind.LOADER), None
    for placeholder in bundle.objects:
        if isinstance(placeholder, MegatronLMDummyDataLoader):
            placeholder.set_megatron_data_args()
            plugin.megatron_dataset_flag = True
            size = plugin.dataset_args.get("micro_batch_size")
    problems = [line for loader in loaders for line in _message_of(refuse_batch_sampler, loader)]
    sizes = [loader.batch_size for loader in loaders if loader.batch_size is not None]
    if size is None and sizes:
        size = (min if plugin.is_train_batch_min else max)(sizes)
    if size is not None:
        replica_size = (plugin.tp_degree or 1) * (plugin.pp_degree or 1) * (plugin.context_parallel_size or 1)
        plugin.set_training_args(int(size), max(1, processes // replica_size))
    elif not problems:
        problems.append(
            "micro_batch_size: the number of samples of a micro-batch is not given. Prepare the loaders "
            "together with the model, or pass micro_batch_size to MegatronLMDummyDataLoader"
        )
    return problems


def _plan_model(plugin: MegatronLMPlugin, bundle: Bundle) -> list[str]:
    if len(bundle.models) != 1:
        return [
            f"{len(bundle.models)} models: Megatron-LM trains one in a process, together with its optimizer. "
            "Pass one model to `prepare`"
        ]
    model = bundle.models[0]
    needs_batch = not (plugin.seq_length or plugin.encoder_seq_length or plugin.decoder_seq_length)
    batch = _sample_batch(bundle.of(Kind.LOADER)) if needs_batch else None
    problems = _message_of(plugin.set_network_size_args, model, batch)
    if problems:
        return problems
    network = plugin.megatron_lm_default_args
    if not network.get("pretraining_flag", True) and plugin.custom_model_provider_function is None:
        problems.append(
            f"{type(model).__name__}: Megatron-LM has models for pretraining only. Pass "
            "custom_model_provider_function to MegatronLMPlugin, or another model"
        )
    return [*problems, *find_wrong_network(plugin, network)]


def _plan_optimizer(plugin: MegatronLMPlugin, bundle: Bundle) -> list[str]:
    if len(bundle.optimizers) != 1:
        return [
            f"{len(bundle.optimizers)} optimizers: Megatron-LM builds one of the same kind. Pass "
            "one to `prepare`, together with the model"
        ]
    problems = _message_of(plugin.set_optimizer_type, bundle.optimizers[0])
    if not problems and plugin.min_lr > (rate := plugin.megatron_lm_default_args["lr"]):
        problems.append(
            f"min_lr={plugin.min_lr}: the optimizer's learning rate is lower, {rate}. Make it smaller"
        )
    return problems


def _plan_schedule(plugin: MegatronLMPlugin, bundle: Bundle) -> list[str]:
    schedulers = bundle.of(Kind.SCHEDULER)
    placeholders = [scheduler for scheduler in schedulers if isinstance(scheduler, MegatronLMDummyScheduler)]
    problems = [
        f"{type(scheduler).__name__}: Megatron-LM steps only its own schedulers. Pass "
        "MegatronLMDummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...), and lr_decay_style "
        "to MegatronLMPlugin"
        for scheduler in schedulers
        if scheduler not in placeholders
    ]
    if placeholders:
        plugin.set_scheduler_args(placeholders[0])
        problems += [line for line in find_wrong_values(plugin) if "different units" in line]
    else:
        plugin.set_schedule_args()
    if not problems and not plugin.train_iters and not plugin.train_samples:
        problems.append(
            "train_iters: the length of the training is not given. Prepare MegatronLMDummyScheduler("
            "optimizer, total_num_steps=...), or set train_iters or train_samples of MegatronLMPlugin"
        )
    return problems


def _message_of(check: Callable[..., None], *arguments: Any) -> list[str]:
    """Returns the message of the error that a check raises, in a list."""
    try:
        check(*arguments)
    except ConfigurationError as error:
        return [str(error).rstrip(".")]
    return []


def _sample_batch(loaders: Sequence[Any]) -> Any:
    """Returns a batch of the first samples of the first map-style dataset, without random numbers."""
    for loader in loaders:
        if isinstance(loader.dataset, IterableDataset) or loader.collate_fn is None or not loader.batch_size:
            continue
        number = min(loader.batch_size, len(loader.dataset))
        return loader.collate_fn([loader.dataset[index] for index in range(number)])
    return None


class MegatronState(StrategyState):
    """State of the engine, which saves and loads model and optimizer."""

    has_engines = True

    def engine_part(self, index: int, model: nn.Module, folder: Path | None = None) -> Part | None:
        return MegatronPart(self.strategy.require_engine(), self.context.topology, folder)

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        raise _unsupported("load_state_dict", "load_checkpoint of the prepared model")

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        raise _unsupported("A full state dict", "save_checkpoint of the prepared model, or save_state")

    def whole_weights(self, model: nn.Module) -> NoReturn:
        raise _unsupported("stream_weights", "save_checkpoint of the prepared model")


class MegatronLM(Strategy):
    """Training with Megatron-LM, which builds its model and optimizer like those of the user."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM
    state_class: ClassVar[type[StrategyState]] = MegatronState
    holds_whole_models = False
    has_plain_weights = False
    keeps_sharding = staticmethod(keep_none)

    loader_mesh: Any = None  # the groups of Megatron-LM, after it is initialized

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engine: MegatronEngine | None = None

    def choose_precision(self) -> Precision:
        return Precision(self.context.mixed_precision)

    @property
    def plugin(self) -> Any:
        """The plugin of the user, which is read when objects are prepared."""
        return AcceleratorState().megatron_lm_plugin

    def check(self, bundle: Bundle) -> None:
        """Raises one error with all reasons why Megatron-LM cannot train the objects."""
        if self.engine is not None:
            if bundle.models or bundle.optimizers:
                raise PreparationError(
                    "Megatron-LM trains one model with one optimizer per process, and has them already. "
                    "Prepare everything in one call."
                )
            return
        context = self.context
        processes, steps = context.topology.size, context.gradients.num_steps
        problems = plan_run(self.plugin, bundle, processes, context.mixed_precision, steps)
        if problems:
            listed = "".join(f"\n  - {problem.rstrip('.')}." for problem in problems)
            raise PreparationError(f"Megatron-LM cannot train this run, {len(problems)} reasons:{listed}")

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        """Returns a context that initializes Megatron-LM, which builds model, optimizer and scheduler."""
        accelerator = self.context.accelerator()
        if self.engine is None:
            library.initialize(accelerator)
            self.loader_mesh = RankGrid()
            self.engine = MegatronEngine(accelerator, *library.prepare_model_optimizer_scheduler(accelerator))
        numbers = [i for i, obj in enumerate(bundle.objects) if isinstance(obj, MegatronLMDummyDataLoader)]
        if numbers:  # the loaders are in the order training, validation, test
            loaders = prepare_data_loader(accelerator, bundle.objects[numbers[0]])
            for number, loader in zip(numbers, loaders, strict=False):
                bundle.objects[number] = mark_prepared(loader)
        yield

    def require_engine(self) -> MegatronEngine:
        """Returns the engine, or raises an error before it is built."""
        if self.engine is None:
            raise PreparationError(
                "Megatron-LM prepares model, optimizer, scheduler and loaders together: pass them to one "
                "call of `prepare`."
            )
        return self.engine

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Returns a loader whose batches have all micro-batches of a step."""
        self.require_engine()
        return with_batch_size(loader, self.plugin.micro_batch_size * self.plugin.num_micro_batches)

    def check_model(self, model: nn.Module) -> None:
        self.require_engine()

    def wrap_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Returns the engine, whose model has the configuration of the user's model and new weights."""
        logger.warning_once(
            "Megatron-LM builds a model with the configuration of the one that was passed, and initializes "
            "its weights. To start from other weights, convert them to a checkpoint of Megatron-LM and call "
            "`load_checkpoint`."
        )
        return self.require_engine()

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        return MegatronLMOptimizerWrapper(self.require_engine().optimizer)

    def wrap_scheduler(
        self,
        scheduler: torch.optim.lr_scheduler.LRScheduler | MegatronLMDummyScheduler,
        step_with_optimizer: StepPolicy,
        split_batches: bool,
    ) -> AcceleratedScheduler:
        return MegatronLMSchedulerWrapper(
            self.require_engine().scheduler, list(self.session.prepared.optimizers)
        )

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Does nothing, because the call of the engine has run the whole step."""

    def unwrap(self, model: nn.Module, *, keep_fp32: bool = True, keep_compiled: bool = True) -> nn.Module:
        """Returns the engine itself, which has no module of the user."""
        return model

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        raise ConfigurationError(
            "join_uneven_inputs does not work with Megatron-LM: all ranks take part in each step. Leave "
            "even_batches on."
        )

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Returns the gradient norm of the last step before clipping, or NaN before the first step."""
        limit = self.plugin.gradient_clipping
        if max_norm != limit:
            logger.warning_once(
                f"Megatron-LM clips gradients by itself, to gradient_clipping={limit} of MegatronLMPlugin: "
                f"max_norm={max_norm} has no effect."
            )
        norm = self.require_engine().grad_norm
        return torch.tensor(math.nan) if norm is None else torch.as_tensor(norm)

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        reason = "Megatron-LM clips the norm of gradients, not their values"
        raise wrong_value("clip_value", clip_value, reason, "Set gradient_clipping of MegatronLMPlugin")

    def release(self) -> None:
        """Releases the engine, but not the process groups of Megatron-LM."""
        self.engine = None


def _unsupported(what: str, instead: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} is not available under Megatron-LM, whose models are sharded over all processes. Use "
        f"{instead}; Megatron-LM's own tools convert its checkpoints."
    )
