"""The mesh: how many processes along which axis, and what the axes are called together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from accelerate import torch_private
from accelerate.base import (
    ConfigurationError,
    DistributedType as DistributedType,  # the import path has always offered it
    StateError,
    current,
    is_torch_version as is_torch_version,  # and this
    wrong_value,
)
from accelerate.plugins import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    at_least,
    one_of,
    plain_fields,
)
from accelerate.settings import decode
from accelerate.settings.sections import ParallelismSection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""All axes from the outermost to the innermost: neighbours along the last one talk the most."""

BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}


@dataclass
class ParallelismConfig:
    """Sizes of the axes of the mesh; their product is the number of processes.

    What is not given is read from PARALLELISM_CONFIG_ with the field's name in capitals when the object is
    built, and otherwise is 1. Sizes that are assigned later take effect when the mesh is built.

    Args:
        dp_replicate_size: Groups of processes that each hold a whole copy of the model.
        dp_shard_size: Processes that share one copy of the model.
        tp_size: Processes that share each layer.
        cp_size: Processes that share each sequence by context parallelism.
        cp_backend: "torch".
        sp_size: Processes that share each sequence by Ulysses sequence parallelism.
        sp_backend: "deepspeed".
        tp_handler: Details of tensor parallelism.
        cp_handler: Details of context parallelism.
        sp_handler: Details of sequence parallelism.

    Raises:
        ConfigurationError: A size below one, an unknown back end, or both ways of sharing sequences.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] | None = None
    sp_size: int | None = None
    sp_backend: Literal["deepspeed"] | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        self.device_mesh: DeviceMesh | None = None
        section = decode(ParallelismSection, current())
        for name in (*(f"{axis}_size" for axis in AXES), *BACKENDS):
            if getattr(self, name) is None:
                setattr(self, name, getattr(section, f"parallelism_config_{name}"))
        for name, known in BACKENDS.items():
            one_of(name, getattr(self, name), known)
        for axis in AXES:
            self._set_size(axis, getattr(self, f"{axis}_size"))
        if self.cp_enabled and self.sp_enabled:
            reason = f"cp_size={self.cp_size} shares sequences already"
            raise wrong_value("sp_size", self.sp_size, reason, "Leave one of them at 1")
        if self.tp_enabled:
            self.tp_handler = self.tp_handler or TorchTensorParallelConfig()
        if self.cp_enabled:
            self.cp_handler = self.cp_handler or TorchContextParallelConfig()
        if self.sp_enabled:
            self.sp_handler = self.sp_handler or DeepSpeedSequenceParallelConfig()

    @property
    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes along which processes see different data."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which processes work on the same data."""
        return self._active("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes along which parameters are sharded."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes along which a loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names, in the built mesh, of what FSDP gets: replicas if there are any, and the sharding axis."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def total_size(self) -> int:
        """Number of processes in the mesh."""
        return prod(self._sizes.values())

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that work on the same data."""
        return prod(self._sizes[axis] for axis in ("tp", "cp", "sp"))

    @property
    def data_parallel_size(self) -> int:
        """Number of groups that see different data."""
        return prod(self._sizes[axis] for axis in ("dp_replicate", "dp_shard"))

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one copy of the model."""
        return self._sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a copy of the model is shared."""
        return self._sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are shared."""
        return self._sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are shared by context parallelism."""
        return self._sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are shared by Ulysses sequence parallelism."""
        return self._sizes["sp"] > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """Axes with more than one process."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh; called on all ranks. A mesh of one process is none.

        Besides its axes it knows their unions by name: "dp", "dp_shard_cp" and "dp_cp".

        Args:
            device_type: torch's name of the devices, such as "cuda" or "cpu".
        """
        from torch.distributed.device_mesh import init_device_mesh

        shape, names = self._get_mesh()
        if not names:
            return None
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        unions = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for union, axes in unions.items():
            if axes:
                torch_private.flatten_mesh(mesh[tuple(axes)], union)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, built at the first call; called on all ranks.

        Args:
            device_type: torch's name of the devices; may be left out once the mesh is built.

        Raises:
            StateError: The mesh is not built yet and the devices are not named.
            ConfigurationError: The mesh was built for other devices.
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
        """Return the fields by name as plain values; the details of an axis are dictionaries."""
        return dataclasses.asdict(self)

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._sizes[axis] > 1]

    def _get_mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return sizes and names of the active axes, the outermost first."""
        names = tuple(axis for axis in AXES if axis in self.active_mesh_dims)
        return tuple(self._sizes[axis] for axis in names), names

    def _set_size(self, parallelism: str, size: int) -> None:
        one_of("parallelism", parallelism, AXES)
        at_least(f"{parallelism}_size", size, 1)
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Refuse a mesh that is not made of all processes."""
        if self.total_size != accelerator.num_processes:
            sizes = " x ".join(f"{axis}_size={size}" for axis, size in self._sizes.items() if size > 1)
            raise ConfigurationError(
                f"{sizes or 'All sizes are 1, which'} makes {self.total_size} processes, and there are "
                f"{accelerator.num_processes}. Change the sizes, or launch with "
                f"--num_processes {self.total_size}."
            )
