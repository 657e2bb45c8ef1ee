"""Facet of `Accelerator`: read-only views of the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate import strategies
from accelerate.accelerator.runtime import Runtime
from accelerate.base import DistributedType, FP8BackendType, PrecisionName, PrecisionType, PreparationError
from accelerate.monitoring import RunTimes
from accelerate.state import step_clock


class Introspection:
    """What a run is: ranks, device, number format, settings of loaders and of the project."""

    _runtime: Runtime

    def step_times(self) -> RunTimes:
        """Return where the time of this rank went since its first step, and in its last window of steps.

        It may be called at any time, on any ranks, and waits for nothing.

        Returns:
            The number of optimizer `steps`, the `seconds`, the `seconds_by` phase ("data", "moving",
            "forward", "backward", "collectives", "optimizer", "saving", "rest"), which add up to them, the
            same as `shares` from 0 to 1, the `samples`, `steps_per_second` and `samples_per_second`; and the
            same of the last second or more as `window`.
        """
        return step_clock.times()

    @property
    def distributed_type(self) -> DistributedType | str:
        """Label of the strategy; assigning it to the state changes no behaviour."""
        return self._runtime.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Number of processes of the run, over all machines."""
        return self._runtime.state.num_processes

    @property
    def process_index(self) -> int:
        """Rank of this process among all."""
        return self._runtime.state.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self._runtime.state.local_process_index

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._runtime.state.device

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._runtime.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether the run uses several devices, one for each process."""
        return self.use_distributed and not self._runtime.state.device_backend.is_host

    @property
    def mixed_precision(self) -> PrecisionType | PrecisionName:
        """Name of the number format: "no", "fp16", "bf16" or "fp8"."""
        return self._runtime.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Library that runs FP8 layers; `FP8BackendType.NO` without them."""
        return self._runtime.strategy.precision.fp8_backend

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed plugin, `None` without DeepSpeed."""
        return self._runtime.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, as the active plugin has it.

        Raises:
            AttributeError: the run does not use DeepSpeed.
        """
        plugin = self._runtime.state.deepspeed_plugin
        if plugin is None:
            raise AttributeError("This run does not use DeepSpeed, so there is no deepspeed_config.")
        config: dict[str, Any] = plugin.deepspeed_config
        return config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The DeepSpeed engine that was built last, in its wrapper; `None` without one."""
        return self._runtime.strategy.engine_wrapped

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by FSDP 2."""
        return self._runtime.state.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """Sizes of the mesh axes, `None` for plain data parallelism."""
        return self._runtime.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, `None` for plain data parallelism."""
        return self._runtime.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether several mesh axes are combined."""
        return self.is_fsdp2

    def _axis_rank(self, axis: str, without_mesh: int) -> int:
        mesh = self.torch_device_mesh
        if mesh is None or axis not in (mesh.mesh_dim_names or ()):
            return without_mesh
        return int(mesh[axis].get_local_rank())

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank on the tensor-parallel axis; 0 without one."""
        return self._axis_rank("tp", 0)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank on the pipeline axis; 0 without one."""
        return self._axis_rank("pp", 0)

    @property
    def context_parallel_rank(self) -> int:
        """Rank on the context-parallel axis; 0 without one."""
        return self._axis_rank("cp", 0)

    @property
    def data_parallel_rank(self) -> int:
        """Rank on the replicating data-parallel axis; the process index without a mesh."""
        return self._axis_rank("dp_replicate", self.process_index)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank on the sharding data-parallel axis; 0 without one."""
        return self._axis_rank("dp_shard", 0)

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the model: the first one of its data-parallel replicas."""
        return self.process_index == 0

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a device map has put `model` on several devices, which several processes cannot train.

        Args:
            model: a module, maybe with `hf_device_map`.
        """
        try:
            for module in model.modules():
                strategies.refuse_split_model(module, "")
        except PreparationError:
            return True
        return False

    @property
    def split_batches(self) -> bool:
        """Whether each process gets a part of one batch instead of a whole one."""
        return self._runtime.request.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether process 0 reads for all; `None` leaves it to the kind of dataset."""
        return self._runtime.request.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equally many, equally large batches; counts at the next `prepare`."""
        return self._runtime.request.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._runtime.request.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is a function of seed and epoch alone."""
        return self._runtime.request.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self._runtime.request.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders restore their own position when a checkpoint is loaded."""
        return self._runtime.request.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """Folder of the project, `None` when there is none."""
        return self._runtime.request.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder of local logs, `None` when there is none."""
        return self._runtime.request.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint under automatic naming."""
        return self._runtime.request.project.iteration
