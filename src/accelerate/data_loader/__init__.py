"""Who reads which batch: loaders shared out between processes."""

from __future__ import annotations

from typing import Any

from accelerate.base.enums import DistributedType as DistributedType
from accelerate.base.enums import RNGType as RNGType
from accelerate.base.packages import is_datasets_available as is_datasets_available
from accelerate.base.packages import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accelerate.base.versions import compare_versions as compare_versions
from accelerate.base.versions import is_torch_version as is_torch_version
from accelerate.data_loader.base import DataLoaderAdapter as DataLoaderAdapter
from accelerate.data_loader.base import DataLoaderStateMixin as DataLoaderStateMixin
from accelerate.data_loader.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate.data_loader.iterable import IterableDatasetShard as IterableDatasetShard
from accelerate.data_loader.prepare import get_sampler as get_sampler
from accelerate.data_loader.prepare import prepare_data_loader as prepare_data_loader
from accelerate.data_loader.samplers import BatchSamplerShard as BatchSamplerShard
from accelerate.data_loader.samplers import SeedableRandomSampler as SeedableRandomSampler
from accelerate.data_loader.samplers import SkipBatchSampler as SkipBatchSampler
from accelerate.data_loader.shard import DataLoaderShard as DataLoaderShard
from accelerate.data_loader.shard import wrapper_for_xla as _wrapper_for_xla
from accelerate.data_loader.skip import SkipDataLoader as SkipDataLoader
from accelerate.data_loader.skip import skip_first_batches as skip_first_batches
from accelerate.devices.availability import is_torch_xla_available as is_torch_xla_available
from accelerate.logging import get_logger as get_logger
from accelerate.nested import concatenate as concatenate
from accelerate.nested import find_batch_size as find_batch_size
from accelerate.nested import get_data_structure as get_data_structure
from accelerate.nested import initialize_tensors as initialize_tensors
from accelerate.nested import send_to_device as send_to_device
from accelerate.nested import slice_tensors as slice_tensors
from accelerate.ops.collectives import broadcast as broadcast
from accelerate.ops.collectives import broadcast_object_list as broadcast_object_list
from accelerate.rng import synchronize_rng_states as synchronize_rng_states
from accelerate.state import GradientState as GradientState
from accelerate.state import PartialState as PartialState

# Public by accident in the interface: loader arguments that came with a torch version, and that version.
additional_kwargs: dict[str, Any] = {"in_order": True}
v = "2.6.0"


def __getattr__(name: str) -> Any:
    # Its base class is torch_xla's: the name exists only where that is installed.
    if name == "MpDeviceLoaderWrapper" and is_torch_xla_available():
        return _wrapper_for_xla()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
