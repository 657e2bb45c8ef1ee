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
    Draws as Draws,
    ReadAhead as ReadAhead,
)
from accelerate.data_loader.base import (
    DataLoaderAdapter as DataLoaderAdapter,
    DataLoaderStateMixin as DataLoaderStateMixin,
    kept_settings as kept_settings,
)
from accelerate.data_loader.batch_metadata import (
    Moment as Moment,
    note_moment as note_moment,
    recall_moment as recall_moment,
)
from accelerate.data_loader.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from accelerate.data_loader.dispatch_messages import Arrival as Arrival, Sender as Sender, receive as receive
from accelerate.data_loader.dispatch_packing import (
    Failure as Failure,
    Piece as Piece,
    pack as pack,
    unpack as unpack,
)
from accelerate.data_loader.dispatch_transport import (
    Route as Route,
    SharedMemory as SharedMemory,
    share_memory as share_memory,
)
from accelerate.data_loader.iterable import IterableDatasetShard as IterableDatasetShard
from accelerate.data_loader.join import InStep as InStep
from accelerate.data_loader.late import (
    start_late as start_late,
    start_where_saved as start_where_saved,
    variant_of as variant_of,
)
from accelerate.data_loader.native_sharding import (
    is_the_same_everywhere as is_the_same_everywhere,
    own_share as own_share,
)
from accelerate.data_loader.plan import ShardPlan as ShardPlan, data_groups as data_groups
from accelerate.data_loader.position import Place as Place, Resume as Resume
from accelerate.data_loader.prepare import (
    get_sampler as get_sampler,
    prepare_data_loader as prepare_data_loader,
)
from accelerate.data_loader.rounds import (
    Dealer as Dealer,
    Round as Round,
    count_samples as count_samples,
    cut_batch as cut_batch,
)
from accelerate.data_loader.samplers import (
    BatchSamplerShard as BatchSamplerShard,
    SamplerShard as SamplerShard,
    SeedableRandomSampler as SeedableRandomSampler,
    SkipBatchSampler as SkipBatchSampler,
    advance as advance,
)
from accelerate.data_loader.shard import (
    DataLoaderShard as DataLoaderShard,
    wrapper_for_xla as wrapper_for_xla,
)
from accelerate.data_loader.skip import (
    SkipDataLoader as SkipDataLoader,
    skip_first_batches as skip_first_batches,
)
from accelerate.data_loader.workers import WorkersObserver as WorkersObserver
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
