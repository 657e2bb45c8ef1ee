from accelerate.settings.sections.deepspeed import (
    DEVICES as DEVICES,
    DeepSpeedSection as DeepSpeedSection,
    OffloadDevice as OffloadDevice,
)
from accelerate.settings.sections.fsdp import FsdpSection as FsdpSection
from accelerate.settings.sections.launch import (
    EXCLUSIVE as EXCLUSIVE,
    GENERAL as GENERAL,
    PARADIGM_OF_TYPE as PARADIGM_OF_TYPE,
    LaunchSection as LaunchSection,
)
from accelerate.settings.sections.megatron import MegatronSection as MegatronSection
from accelerate.settings.sections.parallelism import (
    ContextParallelSection as ContextParallelSection,
    ParallelismSection as ParallelismSection,
    SequenceParallelSection as SequenceParallelSection,
)
from accelerate.settings.sections.precision import (
    BACKENDS as BACKENDS,
    PRECISIONS as PRECISIONS,
    DynamoSection as DynamoSection,
    Fp8Section as Fp8Section,
    PrecisionSection as PrecisionSection,
)
from accelerate.settings.sections.programs import (
    MpirunSection as MpirunSection,
    SageMakerSection as SageMakerSection,
    SlurmSection as SlurmSection,
    TpuSection as TpuSection,
)
from accelerate.settings.sections.rendezvous import (
    DiagnosticsSection as DiagnosticsSection,
    RendezvousSection as RendezvousSection,
    StoppingSection as StoppingSection,
)
