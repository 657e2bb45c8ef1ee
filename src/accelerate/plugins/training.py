"""How data is read, gradients are accumulated, models are compiled and split, and files are named."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from accelerate.base import ConfigurationError, DynamoBackend, DynamoName, environ, refuse_path
from accelerate.plugins.checks import at_least, fill, fill_from, member, one_of, plain_fields
from accelerate.plugins.handlers import KwargsHandler
from accelerate.settings import read
from accelerate.settings.sections import ContextParallelSection, DynamoSection, SequenceParallelSection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """After how many backward passes the optimizer steps.

    Args:
        num_steps: number of backward passes for one optimizer step; None takes what the environment or the
            constructor argument of `Accelerator` says.
        adjust_scheduler: whether prepared schedulers also count the passes that do not step.
        sync_with_dataloader: whether the last batch of a loader ends the window early.
        sync_each_batch: whether gradients are exchanged after every pass: less memory with sharded
            parameters, more traffic.
        skip_nonfinite_updates: whether optimizers skip an update on all ranks if a gradient of any rank is
            infinite or NaN, as a gradient scaler does; reads one number from the device in each update.

    Raises:
        ConfigurationError: fewer than one pass.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    skip_nonfinite_updates: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            at_least("num_steps", self.num_steps, 1)


@dataclass
class DataLoaderConfiguration:
    """How loaders are prepared; attributes that are assigned later take effect at the next `prepare`.

    Args:
        split_batches: True divides each batch of the loader among the processes; False gives each process
            batches of its own, so that one step sees `num_processes` batches.
        dispatch_batches: True reads on the first process only and sends each its share; None does so for
            iterable datasets that no process can divide; False lets each process read its own shards of an
            iterable dataset whose number of shards divides by the number of processes, and otherwise iterate
            all of it.
        even_batches: whether the last batches are filled up from the beginning so that all processes get
            equally many.
        use_seedable_sampler: whether shuffling is a function of `data_seed` and the epoch alone.
        data_seed: seed of that shuffling; None draws one from torch's generator.
        non_blocking: whether batches are copied to the device without waiting for it.
        use_stateful_dataloader: whether loaders go on by themselves after a checkpoint was loaded; where
            torchdata is installed, they are its `StatefulDataLoader` too.
        use_constant_memory_sampler: whether loaders with `shuffle=True` compute the order of an epoch from
            `data_seed` and the epoch, instead of storing it: memory and the time to the first batch do not
            grow with the number of samples, also where an epoch resumes. Includes `use_seedable_sampler`
            with another order. Other samplers stay as they are.
        already_sharded: whether the loaders of each process already yield the shard of its rank: True keeps
            them as they are, False shards them. None keeps a loader as it is if `num_replicas` and `rank` of
            its sampler, batch sampler or iterable dataset are those of the process, as with
            `torch.utils.data.DistributedSampler`, and shards it otherwise.
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


@dataclass
class ProjectConfiguration:
    """Where a project's files go and how its checkpoints are named.

    Args:
        project_dir: folder for everything the project writes.
        logging_dir: folder of local trackers; None is the project folder.
        automatic_checkpoint_naming: whether `save_state` numbers its folders.
        total_limit: how many numbered checkpoints are kept; None keeps all.
        iteration: number of the next checkpoint.
        save_on_each_node: whether each machine writes what otherwise only the first one writes. Machines that
            do not see the folder of the first one do so in any case.
        async_save: whether `save_state` writes in the background by default.

    Raises:
        ConfigurationError: a limit below one, or a negative iteration.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    async_save: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            at_least("total_limit", self.total_limit, 1)
        at_least("iteration", self.iteration, 0)
        if self.logging_dir is not None:
            refuse_path("logging_dir", self.logging_dir)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project folder; the logging folder follows unless it was given.

        Args:
            project_dir: the new project folder.
        """
        if project_dir is not None:
            refuse_path("project_dir", project_dir)
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


_FIELDS = {"dynamo_use_fullgraph": "fullgraph", "dynamo_use_dynamic": "dynamic"}
_DEFAULTS = {"backend": "no", "mode": "default", "fullgraph": False, "use_regional_compilation": False}
DynamoMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_TORCH_DEFAULTS = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled with `torch.compile`.

    What is not given is read from the environment when the object is built.

    Args:
        backend: compiler; a member or its name in any case. From ACCELERATE_DYNAMO_BACKEND, otherwise none.
        mode: what the compiler optimises for. From ACCELERATE_DYNAMO_MODE, otherwise "default".
        fullgraph: whether a model that breaks into several graphs is an error. From
            ACCELERATE_DYNAMO_USE_FULLGRAPH.
        dynamic: whether shapes may change; None lets torch find out. From ACCELERATE_DYNAMO_USE_DYNAMIC.
        options: arguments of the compiler; torch takes either these or a mode.
        disable: whether compiling is switched off although a backend is set.
        use_regional_compilation: whether repeated blocks are compiled, once each kind, instead of the whole
            model. From ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION.

    Raises:
        ConfigurationError: an unknown backend or mode.
    """

    backend: DynamoBackend | DynamoName | None = None
    mode: DynamoMode | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        options = read(environ.current(), (DynamoSection,))
        fill(
            self, {_FIELDS.get(name, name.removeprefix("dynamo_")): value for name, value in options.items()}
        )
        fill(self, _DEFAULTS)
        plain_fields(self)
        name = str(self.backend).upper().replace("TORHCHXLA", "TORCHXLA")  # as older launchers spell it
        self.backend = member("dynamo backend", name, DynamoBackend)
        one_of("dynamo mode", self.mode, get_args(DynamoMode))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, the backend as torch spells it."""
        fields = super().to_dict()
        return {**fields, "backend": fields["backend"].value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults, always with the backend."""
        fields = self.to_dict()
        changed = {name: fields[name] for name, usual in _TORCH_DEFAULTS.items() if fields[name] != usual}
        return {"backend": fields["backend"], **changed}


@dataclass
class TorchTensorParallelPlugin:
    """How many processes share each layer, as older scripts say it.

    Args:
        tp_size: Number of processes.
        torch_device_mesh: The mesh of those processes; None lets it be built.

    Raises:
        ConfigurationError: Fewer than one process.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        at_least("tp_size", self.tp_size, 1)


@dataclass
class TorchTensorParallelConfig:
    """Details of tensor parallelism.

    Args:
        enable_async_tp: Kept for the interface; communication is not overlapped with computation.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: tensor parallelism does not overlap its communication.",
                stacklevel=3,
            )


@dataclass
class TorchContextParallelConfig:
    """Details of context parallelism.

    Args:
        cp_comm_strategy: How keys and values are exchanged: "allgather" (all at once) or "alltoall" (around a
            ring). From PARALLELISM_CONFIG_CP_COMM_STRATEGY, otherwise "allgather".

    Raises:
        ConfigurationError: Another strategy.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        fill_from(self, ContextParallelSection, "parallelism_config_")
        one_of("cp_comm_strategy", self.cp_comm_strategy, ("allgather", "alltoall"))


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Details of Ulysses sequence parallelism.

    What is not given is read from the environment when the object is built.

    Args:
        sp_seq_length: Length of the sequences. From PARALLELISM_CONFIG_SP_SEQ_LENGTH.
        sp_seq_length_is_variable: Whether batches differ in length. From
            PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE, otherwise yes.
        sp_attn_implementation: "sdpa", "flash_attention_2" or "flash_attention_3". From
            PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION, otherwise "sdpa".

    Raises:
        ConfigurationError: Another attention, or a fixed length that is not given.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        fill_from(self, SequenceParallelSection, "parallelism_config_")
        kernels = ("sdpa", "flash_attention_2", "flash_attention_3")
        one_of("sp_attn_implementation", self.sp_attn_implementation, kernels)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "sp_seq_length_is_variable=False: the length is not given. Give sp_seq_length too, or leave "
                "sp_seq_length_is_variable out."
            )
