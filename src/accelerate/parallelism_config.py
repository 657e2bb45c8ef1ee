"""Configuration of the device mesh, with the size and the name of each dimension."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from accelerate import torch_private
from accelerate.base import (
    ConfigurationError,
    DistributedType as DistributedType,  # imported from here by client programs
    StateError,
    current,
    is_torch_version as is_torch_version,  # imported from here by client programs
    wrong_value,
)
from accelerate.plugins import (
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    PipelineConfig,
    TorchContextParallelConfig,
    TorchSequenceParallelConfig,
    TorchTensorParallelConfig,
    at_least,
    one_of,
    plain_fields,
)
from accelerate.settings import decode
from accelerate.settings.sections import ParallelismSection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Data(Enum):
    """Data of the ranks along a dimension of the mesh."""

    BATCHES = "different batches"
    SEQUENCES = "parts of the sequences of one batch"
    COPIES = "the same batch"


class MeshAxis(Enum):
    """Dimensions of the device mesh, from the outermost to the innermost, whose ranks communicate the most.

    The value of a member is the name of the dimension, for which `ParallelismConfig` has a size.

    | member | the ranks along it have |
    |---|---|
    | `PP` | different layers of a model (pipeline parallelism) |
    | `EP` | different experts of layers (expert parallelism) |
    | `DP_REPLICATE` | replicas of the model (data parallelism) |
    | `DP_SHARD` | shards of the parameters of one replica (FSDP) |
    | `CP` | parts of sequences, with attention over all of them (context parallelism) |
    | `SP` | parts of sequences, which they exchange for attention heads (Ulysses sequence parallelism) |
    | `TP` | shards of the weights of layers (tensor parallelism) |

    Attributes:
        data: Data of the ranks along it.
        is_sharding: Whether FSDP shards parameters along it.
    """

    PP = "pp", Data.COPIES
    EP = "ep", Data.BATCHES, True
    DP_REPLICATE = "dp_replicate", Data.BATCHES
    DP_SHARD = "dp_shard", Data.BATCHES, True
    CP = "cp", Data.SEQUENCES, True
    SP = "sp", Data.SEQUENCES
    TP = "tp", Data.COPIES

    data: Data
    is_sharding: bool

    def __new__(cls, name: str, data: Data, is_sharding: bool = False) -> MeshAxis:
        member = object.__new__(cls)
        member._value_, member.data, member.is_sharding = name, data, is_sharding
        return member


AXES: tuple[str, ...] = tuple(axis.value for axis in MeshAxis)
"""Names of the dimensions of the mesh in their order."""


def axes_with(*data: Data) -> tuple[str, ...]:
    """Returns the names of the dimensions of the mesh whose ranks have certain data."""
    return tuple(axis.value for axis in MeshAxis if axis.data in data)


BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed", "torch")}


@dataclass
class ParallelismConfig:
    """Sizes of the dimensions of the device mesh, whose product is the world size.

    Fields that are not passed are read from environment variables when the object is created. The name of a
    variable is PARALLELISM_CONFIG_ and the name of the field in capitals. The default of sizes is 1. Sizes
    that are assigned later take effect when the mesh is built.

    Args:
        pp_size: Number of ranks that have different layers of the model, by pipeline parallelism.
        dp_replicate_size: Number of replicas of the model.
        dp_shard_size: Number of ranks that shard one replica.
        tp_size: Number of ranks that shard each layer, by tensor parallelism.
        cp_size: Number of ranks that shard each sequence, by context parallelism. With `sp_size` above 1 and
            the backend "torch", the product of both shards it.
        cp_backend: "torch".
        sp_size: Number of ranks that shard each sequence, by Ulysses sequence parallelism.
        sp_backend: "deepspeed", whose engine trains the model, or "torch" for all other strategies.
        pp_handler: Options of pipeline parallelism.
        tp_handler: Options of tensor parallelism.
        cp_handler: Options of context parallelism.
        sp_handler: Options of sequence parallelism, of the class for the backend.
        ep_size: Number of ranks that shard the experts of each layer, by expert parallelism. They have
            different batches.
        ep_handler: Options of expert parallelism.

    Raises:
        ConfigurationError: A size is below 1, a backend is unknown, or context parallelism is used with
            sequence parallelism by DeepSpeed.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] | None = None
    sp_size: int | None = None
    sp_backend: Literal["deepspeed", "torch"] | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | TorchSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineConfig | None = None
    ep_size: int | None = None
    ep_handler: ExpertParallelConfig | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        self.device_mesh: DeviceMesh | None = None
        self.expert_meshes: Any = None  # of the run, built with the first model that has experts
        section = decode(ParallelismSection, current())
        for name in (*(f"{axis}_size" for axis in AXES), *BACKENDS):
            if getattr(self, name) is None:
                setattr(self, name, getattr(section, f"parallelism_config_{name}") or 1)
        for name, known in BACKENDS.items():
            one_of(name, getattr(self, name), known)
        for axis in AXES:
            self._set_size(axis, getattr(self, f"{axis}_size"))
        if self.cp_enabled and self.sequence_backend == "deepspeed":
            reason = f"cp_size={self.cp_size} shards sequences already, which DeepSpeed's attention does not"
            fix = 'Set sp_backend="torch", or leave one of them at 1'
            raise wrong_value("sp_size", self.sp_size, reason, fix)
        if self.pp_enabled:
            self.pp_handler = self.pp_handler or PipelineConfig()
        if self.tp_enabled:
            self.tp_handler = self.tp_handler or TorchTensorParallelConfig()
        if self.cp_enabled:
            self.cp_handler = self.cp_handler or TorchContextParallelConfig()
        if self.sp_enabled:
            self._set_sp_handler()
        if self.ep_enabled:
            self.ep_handler = self.ep_handler or ExpertParallelConfig()

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def dp_dim_names(self) -> list[str]:
        """Dimensions along which ranks have different data."""
        return self._active(*axes_with(Data.BATCHES))

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions along which ranks have the same data."""
        return self._active(*axes_with(Data.COPIES), *axes_with(Data.SEQUENCES))

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions along which FSDP shards parameters, where "ep" does not shard those of experts again."""
        shards_sequences = self.sequence_backend == "torch"
        return self._active(
            *(a.value for a in MeshAxis if a.is_sharding or (a is MeshAxis.SP and shards_sequences))
        )

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions along which a loss is averaged."""
        names = {*axes_with(Data.BATCHES), *self.dp_shard_cp_dim_names}
        return self._active(*(name for name in AXES if name in names))

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the mesh dimensions of FSDP, which are the replicas, if there are any, and the shards."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def total_size(self) -> int:
        """Number of ranks in the mesh."""
        return prod(self._sizes.values())

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that have the same data."""
        return prod(self._sizes[axis] for axis in axes_with(Data.SEQUENCES, Data.COPIES))

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that have different data."""
        return prod(self._sizes[axis] for axis in axes_with(Data.BATCHES))

    @property
    def pp_enabled(self) -> bool:
        """True if layers are on different ranks, by pipeline parallelism."""
        return self._sizes["pp"] > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if there is more than one replica of the model."""
        return self._sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if each replica of the model is sharded."""
        return self._sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """True if layers are sharded by tensor parallelism."""
        return self._sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """True if sequences are sharded by context parallelism."""
        return self._sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """True if sequences are sharded by Ulysses sequence parallelism."""
        return self._sizes["sp"] > 1

    @property
    def sequence_backend(self) -> str | None:
        """Backend of Ulysses sequence parallelism, or None if it does not shard sequences."""
        return self.sp_backend if self.sp_enabled else None

    @property
    def ep_enabled(self) -> bool:
        """True if experts are sharded by expert parallelism."""
        return self._sizes["ep"] > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """Dimensions with more than one rank."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Builds the device mesh, with the flattened dimensions "dp", "dp_shard_cp" and "dp_cp".

        All ranks must call it.

        Args:
            device_type: Type of the devices in torch, such as "cuda" or "cpu".

        Returns:
            The mesh, or None for a single rank.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        shape, names = self._get_mesh()
        if not names:
            return None
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        flattened = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for name, axes in flattened.items():
            if axes:
                torch_private.flatten_mesh(mesh[tuple(axes)], name)
        if dist.get_backend() == "gloo":
            # A process that ends before the other ranks have connected to each other would make them fail.
            dist.barrier()
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Returns the device mesh, which the first call builds.

        All ranks must call it.

        Args:
            device_type: Type of the devices in torch. It may be omitted after the mesh is built.

        Raises:
            StateError: The mesh is not built yet, and `device_type` is omitted.
            ConfigurationError: The mesh was built for another type of devices.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise StateError("The mesh is not built yet. Call get_device_mesh(device_type) first.")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            reason = f"the mesh was built for {self.device_mesh.device_type}"
            raise wrong_value("device_type", device_type, reason, "Build another ParallelismConfig")
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name as plain values, with dictionaries for the options of a dimension.

        A function is written by its name.
        """
        fields = dataclasses.asdict(self)
        if self.ep_handler is not None and self.ep_handler.is_experts is not None:
            fields["ep_handler"]["is_experts"] = getattr(
                self.ep_handler.is_experts, "__qualname__", "unnamed"
            )
        return fields

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._sizes[axis] > 1]

    def _get_mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Returns the sizes and names of the active dimensions, the outermost first."""
        names = tuple(axis for axis in AXES if axis in self.active_mesh_dims)
        return tuple(self._sizes[axis] for axis in names), names

    def _set_sp_handler(self) -> None:
        """Creates the options of the backend of sequence parallelism, or checks those of the user."""
        kinds = {"deepspeed": DeepSpeedSequenceParallelConfig, "torch": TorchSequenceParallelConfig}
        kind = kinds[str(self.sp_backend)]
        if self.sp_handler is None:
            self.sp_handler = kind()
        elif not isinstance(self.sp_handler, kind):
            reason = f"sp_backend={self.sp_backend!r} has other options"
            raise wrong_value("sp_handler", type(self.sp_handler).__name__, reason, f"Pass {kind.__name__}")

    def _set_size(self, parallelism: str, size: int) -> None:
        one_of("parallelism", parallelism, AXES)
        at_least(f"{parallelism}_size", size, 1)
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Raises an error if the size of the mesh is not the world size."""
        if self.total_size != accelerator.num_processes:
            sizes = " x ".join(f"{axis}_size={size}" for axis, size in self._sizes.items() if size > 1)
            raise ConfigurationError(
                f"{sizes or 'All sizes are 1, which'} makes {self.total_size} processes, and there are "
                f"{accelerator.num_processes}. Change the sizes, or launch with "
                f"--num_processes {self.total_size}."
            )
