from accelerate.planning.inputs import (
    batch_for as batch_for,
    classification_loss as classification_loss,
    loss_or_mean as loss_or_mean,
    timm_batch as timm_batch,
)
from accelerate.planning.layouts import (
    OFFLOADS as OFFLOADS,
    SHARDINGS as SHARDINGS,
    ZERO_STAGES as ZERO_STAGES,
    Layout as Layout,
    Sharding as Sharding,
    candidates as candidates,
    communication_of as communication_of,
    host_bytes as host_bytes,
    memory_of as memory_of,
    read_devices as read_devices,
)
from accelerate.planning.parts import Parts as Parts, Trace as Trace
from accelerate.planning.plan import (
    LARGEST_BATCH as LARGEST_BATCH,
    Fit as Fit,
    MemoryPlan as MemoryPlan,
    Planner as Planner,
    Variant as Variant,
    bar_of as bar_of,
    build_plan as build_plan,
    largest_batch as largest_batch,
    layouts_table as layouts_table,
    table_of as table_of,
)
from accelerate.planning.tracing import (
    Loss as Loss,
    Step as Step,
    batch_size_of as batch_size_of,
    blocks_of as blocks_of,
    loss_of as loss_of,
    trace_step as trace_step,
)
from accelerate.planning.variants import tracer_of as tracer_of
