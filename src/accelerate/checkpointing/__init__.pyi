from accelerate.base import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    get_pretty_name as get_pretty_name,
    is_torch_version as is_torch_version,
)
from accelerate.checkpointing import (
    loading as loading,
    manifest as manifest,
    retention as retention,
    saving as saving,
)
from accelerate.checkpointing.changes import (
    Change as Change,
    Stage as Stage,
    apply_all as apply_all,
    no_change as no_change,
)
from accelerate.checkpointing.compatibility import (
    GROUPS as GROUPS,
    PARAMETERS as PARAMETERS,
    STATE as STATE,
    check_optimizer as check_optimizer,
    check_shapes as check_shapes,
    class_name as class_name,
    in_order as in_order,
    live_state as live_state,
)
from accelerate.checkpointing.fast_tier import (
    FastTier as FastTier,
    GenerationSaver as GenerationSaver,
    open_fast_tier as open_fast_tier,
)
from accelerate.checkpointing.folder import (
    LOADED as LOADED,
    StagingFolder as StagingFolder,
    loaded_lines as loaded_lines,
    name_of as name_of,
    number_of as number_of,
    plan_staging_folder as plan_staging_folder,
    recover as recover,
    remove as remove,
    saved_lines as saved_lines,
)
from accelerate.checkpointing.generations import (
    SHARDS as SHARDS,
    Generation as Generation,
    find_generations as find_generations,
    next_number as next_number,
    open_generation as open_generation,
)
from accelerate.checkpointing.items import (
    GeneratorsPart as GeneratorsPart,
    LoaderPart as LoaderPart,
    ShardsOrFilePart as ShardsOrFilePart,
    StateItem as StateItem,
    apply_items as apply_items,
    capture_generators as capture_generators,
    capture_items as capture_items,
    check_generators as check_generators,
    check_items as check_items,
    folder_of as folder_of,
    model_item as model_item,
    object_item as object_item,
    optimizer_item as optimizer_item,
    seed_of as seed_of,
)
from accelerate.checkpointing.loading import (
    CheckpointSource as CheckpointSource,
    RunProgress as RunProgress,
    WorldSizePolicy as WorldSizePolicy,
    divide_files as divide_files,
    nothing_to_load as nothing_to_load,
    read_progress as read_progress,
)
from accelerate.checkpointing.local_shards import (
    Box as Box,
    LocalShards as LocalShards,
    PlainValue as PlainValue,
    Shape as Shape,
    Shard as Shard,
    box_of as box_of,
    boxes_of_range as boxes_of_range,
    copy_shards as copy_shards,
    shards_of_range as shards_of_range,
    single_shard as single_shard,
    target_of as target_of,
    to_local_shards as to_local_shards,
    to_tensor as to_tensor,
)
from accelerate.checkpointing.manifest import (
    LARGEST as LARGEST,
    NEXT_DURABLE as NEXT_DURABLE,
    FileRecord as FileRecord,
    Manifest as Manifest,
    check_fields as check_fields,
    files_under as files_under,
    measure as measure,
    refuse_name as refuse_name,
    seal as seal,
)
from accelerate.checkpointing.parts import (
    CheckpointReader as CheckpointReader,
    ModelPart as ModelPart,
    OptimizerPart as OptimizerPart,
    Part as Part,
    Payload as Payload,
    StatePart as StatePart,
    custom_part as custom_part,
    fill as fill,
    number as number,
    optimizer_parts as optimizer_parts,
    read_device as read_device,
    state_parts as state_parts,
    weights_change as weights_change,
    write_state as write_state,
)
from accelerate.checkpointing.retention import checkpoints_below as checkpoints_below
from accelerate.checkpointing.saving import (
    Request as Request,
    Saver as Saver,
    Staging as Staging,
)
from accelerate.checkpointing.shard_index import (
    KeyPath as KeyPath,
    ShardIndex as ShardIndex,
    read_metadata as read_metadata,
)
from accelerate.checkpointing.sharded import (
    MODEL as MODEL,
    OPTIMIZER as OPTIMIZER,
    ModuleShards as ModuleShards,
    OptimizerShards as OptimizerShards,
    ShardedState as ShardedState,
    by_name as by_name,
    group_paths as group_paths,
    loaded_groups as loaded_groups,
    optimizer_change as optimizer_change,
    read_shards as read_shards,
    refuse_other_optimizer as refuse_other_optimizer,
    refuse_own_form as refuse_own_form,
    refuse_unnamed_state as refuse_unnamed_state,
)
from accelerate.checkpointing.shards import (
    find_shards as find_shards,
    plan_files as plan_files,
    read_size as read_size,
    save_from_shards as save_from_shards,
    save_sharded as save_sharded,
    write_files as write_files,
)
from accelerate.checkpointing.staging import (
    BackgroundSave as BackgroundSave,
    Checkpoints as Checkpoints,
    StagingMemory as StagingMemory,
)
from accelerate.checkpointing.state import (
    load_accelerator_state as load_accelerator_state,
    load_custom_state as load_custom_state,
    save_accelerator_state as save_accelerator_state,
    save_custom_state as save_custom_state,
)
from accelerate.checkpointing.state_layouts import (
    LAYOUTS as LAYOUTS,
    distribute as distribute,
    layouts_of as layouts_of,
    place_state as place_state,
    refuse_inner_dtensors as refuse_inner_dtensors,
)
from accelerate.checkpointing.temporary import (
    DELETING as DELETING,
    OLD as OLD,
    SAVING as SAVING,
    claim as claim,
    dispose as dispose,
    find as find,
    release as release,
    sweep as sweep,
)
from accelerate.devices import (
    is_cuda_available as is_cuda_available,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xpu_available as is_xpu_available,
)
from accelerate.logging import get_logger as get_logger
from accelerate.state import PartialState as PartialState
from accelerate.weights import load as load, save as save
