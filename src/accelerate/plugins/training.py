"""Plugins for data loading, gradient accumulation, compilation, parallelism and project folders."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from accelerate.base import ConfigurationError, DynamoBackend, DynamoName, current, refuse_path, wrong_value
from accelerate.plugins.checks import (
    at_least,
    check_choices,
    fill_from,
    member,
    one_of,
    plain_fields,
    whole_at_least,
)
from accelerate.plugins.handlers import KwargsHandler
from accelerate.settings import decode
from accelerate.settings.sections import (
    ContextParallelSection,
    DynamoSection,
    PipelineSection,
    SequenceParallelSection,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    Args:
        num_steps: Number of backward passes for one optimizer step. None uses the environment or the
            constructor argument of `Accelerator`.
        adjust_scheduler: Whether prepared schedulers also count the passes that do not step.
        sync_with_dataloader: Whether the last batch of a loader ends the accumulation early.
        sync_each_batch: Whether gradients are synchronized after every backward pass. Uses less memory with
            sharded parameters, and more communication. Replicas of shards are averaged after the last one.
        skip_nonfinite_updates: Whether optimizers skip an update on all ranks if a gradient of any rank is
            infinite or NaN, as a gradient scaler does. Reads one number from the device in each update.
        global_batch_size: Number of samples of one optimizer step on all processes together. Loaders for
            training have torch's batch sampler, and a batch size that divides it. The number of micro-batches
            follows from it and from the number of processes, and `accelerator.backward` weights the mean loss
            of each by its samples. So a step is that of one process with this batch size, whatever the number
            of processes is. Prepared schedulers step once for each optimizer step. None: `num_steps` batches
            of each process.
        check_replicas: Whether optimizers compare the weights that several ranks have after steps 1, 2, 4, 8
            and so on, and raise an error if they differ. False for ranks that train separately on purpose.

    Raises:
        ConfigurationError: `num_steps` or `global_batch_size` is less than 1, or both are set.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    skip_nonfinite_updates: bool = False
    global_batch_size: int | None = None
    check_replicas: bool = True

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            at_least("num_steps", self.num_steps, 1)
        if self.global_batch_size is None:
            return
        if isinstance(self.global_batch_size, bool) or not isinstance(self.global_batch_size, int):
            reason, fix = "it is not a number of samples", "Pass an integer of at least 1"
            raise wrong_value("global_batch_size", self.global_batch_size, reason, fix, TypeError)
        at_least("global_batch_size", self.global_batch_size, 1)
        if self.num_steps not in (None, 1):
            reason = "num_steps follows from global_batch_size and the number of processes"
            raise wrong_value("num_steps", self.num_steps, reason, "Pass one of them")
        if not self.sync_with_dataloader:
            reason = "the last step of an epoch has the remaining samples with global_batch_size"
            raise wrong_value("sync_with_dataloader", False, reason, "Leave it out")


@dataclass
class DataLoaderConfiguration:
    """Settings of prepared data loaders.

    Attributes that are assigned later take effect at the next `prepare`.

    Args:
        split_batches: True splits each batch of the loader across the ranks. False gives each rank whole
            batches, so that one step consumes `num_processes` batches.
        dispatch_batches: True reads on rank 0 only, which sends each rank its shard. None does so for
            iterable datasets that cannot be sharded. False lets each rank read its own shards of an iterable
            dataset if the world size divides its number of shards, and otherwise iterate over all of it.
        even_batches: Whether the last batches are padded with samples from the beginning, so that all ranks
            get the same number of batches.
        use_seedable_sampler: Whether the order of samples depends on `data_seed` and the epoch alone.
        data_seed: Seed of that order. None draws one from torch's generator.
        non_blocking: Whether batches are copied to the device asynchronously.
        use_stateful_dataloader: Whether loaders resume within an epoch after a checkpoint is loaded. If
            torchdata is installed, they are instances of its `StatefulDataLoader`, too.
        use_constant_memory_sampler: Whether loaders with `shuffle=True` compute the order of an epoch from
            `data_seed` and the epoch, instead of storing it. Memory and the time to the first batch do not
            grow with the number of samples, also if an epoch is resumed. Includes `use_seedable_sampler`
            with another order. Other samplers are not changed.
        already_sharded: Whether the loaders of each rank already yield its shard. True does not change
            them, False shards them. None does not change a loader if `num_replicas` and `rank` of its
            sampler, batch sampler or iterable dataset are those of the process, as with
            `torch.utils.data.DistributedSampler`, and shards it otherwise.
        check_packing: Whether the first training batch is computed twice more if its `position_ids` restart,
            to raise an error if its documents affect each other. See `Accelerator.check_isolation`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    use_constant_memory_sampler: bool = False
    already_sharded: bool | None = None
    check_packing: bool = True


@dataclass
class ProjectConfiguration:
    """Folders of a project and names of its checkpoints.

    Args:
        project_dir: Folder of all files that the project writes.
        logging_dir: Folder of local trackers. None uses the project folder.
        automatic_checkpoint_naming: Whether `save_state` numbers its folders.
        total_limit: Number of numbered checkpoints to keep. None keeps all.
        iteration: Number of the next checkpoint.
        save_on_each_node: Whether each node writes the files that otherwise only the first node writes. Nodes
            that cannot access the folder of the first node do so in any case.
        async_save: Whether `save_state` writes in the background by default.
        fast_dir: Folder in memory or on a local disk of each node for recent checkpoints, such as
            "/dev/shm/run". None keeps no recent checkpoints.
        fast_every: Number of optimizer steps between two recent checkpoints.
        copies: Number of other nodes that hold a copy of the files of a node. None is 1 if there are several
            nodes, otherwise 0.
        durable_every: Number of recent checkpoints after which one is also written to the folder of the
            project. None writes there only when `save_state` is called.

    Raises:
        ConfigurationError: A number is too small, or an option needs another one that is not set.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False
    fast_dir: str | None = None
    fast_every: int = 20
    copies: int | None = None
    durable_every: int | None = None

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            at_least("total_limit", self.total_limit, 1)
        at_least("iteration", self.iteration, 0)
        if self.logging_dir is not None:
            refuse_path("logging_dir", self.logging_dir)
        self._check_fast_tier()
        self.set_directories(self.project_dir)

    def _check_fast_tier(self) -> None:
        if self.fast_dir is not None:
            fix = 'Give a folder such as "/dev/shm/run", or None for no recent checkpoints'
            if not isinstance(self.fast_dir, (str, os.PathLike)):
                raise wrong_value("fast_dir", self.fast_dir, "it is not a path", fix, TypeError)
            if not os.fspath(self.fast_dir):
                raise wrong_value("fast_dir", self.fast_dir, "it is empty", fix)
            refuse_path("fast_dir", self.fast_dir)
        whole_at_least("fast_every", self.fast_every, 1)
        for name, least in (("copies", 0), ("durable_every", 1)):
            value = getattr(self, name)
            if value is not None:
                whole_at_least(name, value, least)
                if self.fast_dir is None:
                    raise wrong_value(name, value, "there is no fast tier", "Set fast_dir")
        if self.durable_every is not None and not self.automatic_checkpoint_naming:
            reason = "durable checkpoints have no names"
            fix = "Set project_dir and automatic_checkpoint_naming=True"
            raise wrong_value("durable_every", self.durable_every, reason, fix)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Sets the project folder, and the logging folder unless it was given.

        Args:
            project_dir: The new project folder.
        """
        if project_dir is not None:
            refuse_path("project_dir", project_dir)
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


DynamoMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_TORCH_DEFAULTS = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile` for prepared models.

    Fields that are None are read from the environment when the object is built.

    Args:
        backend: Backend of the compiler, as a member or its name in any case. From
            ACCELERATE_DYNAMO_BACKEND, otherwise none.
        mode: Mode of the compiler. From ACCELERATE_DYNAMO_MODE, otherwise "default".
        fullgraph: Whether a graph break is an error. From ACCELERATE_DYNAMO_USE_FULLGRAPH.
        dynamic: Whether shapes may change. None lets torch detect it. From ACCELERATE_DYNAMO_USE_DYNAMIC.
        options: Arguments of the backend. torch accepts either these or a mode.
        disable: Whether compilation is disabled although a backend is set.
        use_regional_compilation: Whether repeated blocks are compiled, once for each kind, instead of the
            whole model. From ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION.

    Raises:
        ConfigurationError: The backend or the mode is unknown.
    """

    backend: DynamoBackend | DynamoName | None = None
    mode: DynamoMode | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        fill_from(self, DynamoSection, optional=("dynamic",))
        plain_fields(self)
        name = str(self.backend).upper().replace("TORHCHXLA", "TORCHXLA")  # misspelled by older launchers
        self.backend = member("dynamo backend", name, DynamoBackend)
        one_of("dynamo mode", self.mode, get_args(DynamoMode))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name, with torch's name of the backend."""
        fields = super().to_dict()
        return {**fields, "backend": fields["backend"].value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the backend, and the other arguments of `torch.compile` that differ from its defaults."""
        fields = self.to_dict()
        changed = {name: fields[name] for name, default in _TORCH_DEFAULTS.items() if fields[name] != default}
        return {"backend": fields["backend"], **changed}


@dataclass
class TorchTensorParallelPlugin:
    """Tensor-parallel size, in the form that older scripts pass.

    Args:
        tp_size: Number of ranks that each layer is sharded across.
        torch_device_mesh: Device mesh of those ranks. None builds it.

    Raises:
        ConfigurationError: `tp_size` is less than 1.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        at_least("tp_size", self.tp_size, 1)


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Args:
        enable_async_tp: Kept for compatibility. Communication is not overlapped with computation.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: tensor parallelism does not overlap its communication.",
                stacklevel=3,
            )


class PipelineSchedule(NamedTuple):
    """Properties of a schedule of `torch.distributed.pipelining`.

    Attributes:
        stages_per_rank: Default number of stages on each rank.
        is_v: Whether the last rank has two adjacent stages, and the first rank the first and the last one.
        splits_backward: Whether gradients of inputs and of weights are computed in separate passes.
        has_rounds: Whether micro-batches run in rounds of one size, with at least one for each rank.
        for_few: Schedule with the same stages for batches with too few micro-batches.
    """

    stages_per_rank: int
    for_few: str
    is_v: bool = False
    splits_backward: bool = False
    has_rounds: bool = False


SCHEDULES = {
    "gpipe": PipelineSchedule(1, "gpipe"),
    "1f1b": PipelineSchedule(1, "gpipe"),
    "interleaved1f1b": PipelineSchedule(2, "loopedbfs", has_rounds=True),
    "loopedbfs": PipelineSchedule(2, "loopedbfs"),
    "interleavedzerobubble": PipelineSchedule(2, "loopedbfs", splits_backward=True, has_rounds=True),
    "zbvzerobubble": PipelineSchedule(2, "zbvzerobubble", is_v=True, splits_backward=True),
    "dualpipev": PipelineSchedule(2, "zbvzerobubble", is_v=True, splits_backward=True),
}
"""Schedules by the names of their classes in torch, in lower case."""


def _pipeline_section() -> PipelineSection:
    return decode(PipelineSection, current())


@dataclass
class PipelineConfig:
    """Options of pipeline parallelism.

    Fields that are not passed are read from environment variables.

    Args:
        schedule: Order of the forward and backward passes of micro-batches, by the name that torch gives it,
            in any case: "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
            "ZBVZeroBubble" or "DualPipeV". From PARALLELISM_CONFIG_PP_SCHEDULE, otherwise "1F1B".
        microbatches: Number of parts into which a batch is split. A batch with fewer samples has fewer. From
            PARALLELISM_CONFIG_PP_MICROBATCHES, otherwise 8.
        split: "auto", or the names of the modules with which the stages after the first begin.
        stages_per_rank: Number of stages on each rank. The default is 1 for "GPipe" and "1F1B", which take no
            other number, and 2 for other schedules.
        verify: Whether the first batch is also computed without the pipeline, and an error is raised if the
            loss, the gradients or the outputs differ. Each rank then needs memory for the whole model and two
            micro-batches, on its device or otherwise on the CPU.

    Raises:
        ConfigurationError: The schedule is unknown, or a number does not fit it.
    """

    schedule: str = field(default_factory=lambda: _pipeline_section().parallelism_config_pp_schedule)
    microbatches: int = field(default_factory=lambda: _pipeline_section().parallelism_config_pp_microbatches)
    split: str | Sequence[str] = "auto"
    stages_per_rank: int | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        name = str(self.schedule).lower()
        one_of("schedule", name, SCHEDULES)
        self.schedule = name
        at_least("microbatches", self.microbatches, 1)
        known = SCHEDULES[name]
        if self.stages_per_rank is None:
            self.stages_per_rank = known.stages_per_rank
        at_least("stages_per_rank", self.stages_per_rank, 1)
        is_fixed = known.stages_per_rank == 1 or known.is_v
        if is_fixed and self.stages_per_rank != known.stages_per_rank:
            reason = f"{name} takes {known.stages_per_rank} on each rank"
            raise wrong_value("stages_per_rank", self.stages_per_rank, reason, "Leave it out")
        if isinstance(self.split, str) and self.split != "auto":
            raise wrong_value("split", self.split, "it is neither 'auto' nor a list", "Pass a list of names")


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism.

    Args:
        cp_comm_strategy: Communication of keys and values, "allgather" (all at once) or "alltoall" (around a
            ring). From PARALLELISM_CONFIG_CP_COMM_STRATEGY, otherwise "allgather".

    Raises:
        ConfigurationError: The strategy is unknown.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        fill_from(self, ContextParallelSection)
        check_choices(self, ContextParallelSection, "cp_comm_strategy")


@dataclass
class ExpertParallelConfig:
    """Options of expert parallelism.

    Args:
        is_experts: Returns whether a module holds the experts of a layer. Its parameters have one entry for
            each expert in their first dimension. Its forward takes hidden states of shape [tokens, features],
            indices of experts and weights, both of shape [tokens, choices], and returns the sum of the
            weighted outputs of the chosen experts. None reads the plan of the model, `ep_plan`.
    """

    is_experts: Callable[[Module], bool] | None = None


@dataclass
class TorchSequenceParallelConfig:
    """Options of Ulysses sequence parallelism by torch.

    Args:
        sequence_dims: Dimension of the sequence in inputs of models, by the names of arguments and of keys of
            mappings, or None for an input that is not divided. Other inputs are divided along dimension 1 if
            it has the length of the sequences, except for masks, which stay whole.
    """

    sequence_dims: dict[str, int | None] = field(default_factory=dict)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of Ulysses sequence parallelism.

    Fields that are None are read from the environment when the object is built.

    Args:
        sp_seq_length: Length of the sequences, in tokens. From PARALLELISM_CONFIG_SP_SEQ_LENGTH.
        sp_seq_length_is_variable: Whether the sequence length differs between batches. From
            PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE, otherwise True.
        sp_attn_implementation: "sdpa", "flash_attention_2" or "flash_attention_3". From
            PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION, otherwise "sdpa".

    Raises:
        ConfigurationError: The attention implementation is unknown, or the length is fixed and not given.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        fill_from(self, SequenceParallelSection)
        check_choices(self, SequenceParallelSection, "sp_attn_implementation")
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "sp_seq_length_is_variable=False: the length is not given. Give sp_seq_length too, or leave "
                "sp_seq_length_is_variable out."
            )
