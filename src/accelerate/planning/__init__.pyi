from accelerate.planning.checks import check_step as check_step
from accelerate.planning.inputs import (
    batch_for as batch_for,
    classification_loss as classification_loss,
    loss_or_mean as loss_or_mean,
    timm_batch as timm_batch,
)
from accelerate.planning.kernels import KernelMode as KernelMode
from accelerate.planning.layouts import (
    SHARDINGS as SHARDINGS,
    ZERO_STAGES as ZERO_STAGES,
    Layout as Layout,
    Sharding as Sharding,
    candidate_layouts as candidate_layouts,
    communication_of as communication_of,
    host_bytes as host_bytes,
    least_bytes as least_bytes,
    memory_of as memory_of,
    parse_devices as parse_devices,
)
from accelerate.planning.libraries import disable_caches as disable_caches
from accelerate.planning.parts import Parts as Parts, Trace as Trace
from accelerate.planning.plan import (
    LARGEST_BATCH as LARGEST_BATCH,
    FittingLayout as FittingLayout,
    MemoryPlan as MemoryPlan,
    Planner as Planner,
    Variant as Variant,
    build_plan as build_plan,
    format_bar as format_bar,
    format_layouts as format_layouts,
    format_parts as format_parts,
    largest_batch as largest_batch,
)
from accelerate.planning.policies import (
    Policy as Policy,
    choose_policy as choose_policy,
    policies_for as policies_for,
)
from accelerate.planning.tracing import (
    Loss as Loss,
    Step as Step,
    batch_size_of as batch_size_of,
    blocks_of as blocks_of,
    fake_operators as fake_operators,
    loss_of as loss_of,
    loss_or_sum as loss_or_sum,
    meta_copy as meta_copy,
    trace_step as trace_step,
)
from accelerate.planning.variants import tracer_of as tracer_of
