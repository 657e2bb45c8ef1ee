from typing import Any

from accelerate.base import (
    DistributedType as DistributedType,
    RNGType as RNGType,
    compare_versions as compare_versions,
    is_datasets_available as is_datasets_available,
    is_torch_version as is_torch_version,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accelerate.data_loader.background import (
    MESSAGE_BYTES as MESSAGE_BYTES,
    RandomDrawDetector as RandomDrawDetector,
    ReadAhead as ReadAhead,
)
from accelerate.data_loader.base import (
    BatchMetadata as BatchMetadata,
    DataLoaderAdapter as DataLoaderAdapter,
    DataLoaderStateMixin as DataLoaderStateMixin,
    get_batch_metadata as get_batch_metadata,
    kept_settings as kept_settings,
    set_batch_metadata as set_batch_metadata,
)
from accelerate.data_loader.constant_batches import StepPart as StepPart, StepPlan as StepPlan
from accelerate.data_loader.dispatch_transport import (
    BatchChannel as BatchChannel,
    BatchSender as BatchSender,
    PackedPart as PackedPart,
    ReaderFailure as ReaderFailure,
    ReceivedBatch as ReceivedBatch,
    SharedMemoryCollate as SharedMemoryCollate,
    pack as pack,
    receive_batches as receive_batches,
    unpack as unpack,
)
from accelerate.data_loader.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate.data_loader.global_batches import (
    GlobalBatch as GlobalBatch,
    GlobalBatchBuilder as GlobalBatchBuilder,
)
from accelerate.data_loader.iterable_shard import IterableDatasetShard as IterableDatasetShard
from accelerate.data_loader.joining import DatasetJoin as DatasetJoin
from accelerate.data_loader.last_batch import (
    PaddingSource as PaddingSource,
    count_samples as count_samples,
    cut_batch as cut_batch,
)
from accelerate.data_loader.late_start import (
    make_resumed_loader as make_resumed_loader,
    skip_before_sharding as skip_before_sharding,
    skip_prepared as skip_prepared,
)
from accelerate.data_loader.loaders import (
    DataLoaderShard as DataLoaderShard,
    wrapper_for_xla as wrapper_for_xla,
)
from accelerate.data_loader.memory_pools import (
    MemoryPool as MemoryPool,
    SharedMemoryPool as SharedMemoryPool,
    share_memory as share_memory,
)
from accelerate.data_loader.native_sharding import (
    is_the_same_everywhere as is_the_same_everywhere,
    native_shard as native_shard,
)
from accelerate.data_loader.permutation import (
    ConstantMemorySampler as ConstantMemorySampler,
    IndexPermutation as IndexPermutation,
    SeedableRandomSampler as SeedableRandomSampler,
)
from accelerate.data_loader.plan import (
    SHARED_AXES as SHARED_AXES,
    ShardPlan as ShardPlan,
    data_groups as data_groups,
)
from accelerate.data_loader.position import Position as Position, Restored as Restored, Tracker as Tracker
from accelerate.data_loader.prepare import (
    get_sampler as get_sampler,
    prepare_data_loader as prepare_data_loader,
    synchronize_order as synchronize_order,
)
from accelerate.data_loader.rank_aware import has_own_shard as has_own_shard
from accelerate.data_loader.reading import (
    LastMark as LastMark,
    WorkersObserver as WorkersObserver,
)
from accelerate.data_loader.samplers import (
    BatchSamplerShard as BatchSamplerShard,
    SamplerShard as SamplerShard,
    SkipBatchSampler as SkipBatchSampler,
    advance as advance,
)
from accelerate.data_loader.skip import (
    SkipDataLoader as SkipDataLoader,
    skip_first_batches as skip_first_batches,
)
from accelerate.devices import is_torch_xla_available as is_torch_xla_available
from accelerate.logging import get_logger as get_logger
from accelerate.nested import (
    concatenate as concatenate,
    find_batch_size as find_batch_size,
    get_data_structure as get_data_structure,
    initialize_tensors as initialize_tensors,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from accelerate.ops import broadcast as broadcast, broadcast_object_list as broadcast_object_list
from accelerate.rng import synchronize_rng_states as synchronize_rng_states
from accelerate.state import GradientState as GradientState, PartialState as PartialState

additional_kwargs: dict[str, Any]
v: str
MpDeviceLoaderWrapper: type
