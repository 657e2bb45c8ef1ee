from accelerate.settings.sections.launch import (
    EXCLUSIVE as EXCLUSIVE,
    GENERAL as GENERAL,
    PARADIGM_OF_TYPE as PARADIGM_OF_TYPE,
    DiagnosticsSection as DiagnosticsSection,
    LaunchSection as LaunchSection,
    MpirunSection as MpirunSection,
    RendezvousSection as RendezvousSection,
    SageMakerSection as SageMakerSection,
    SlurmSection as SlurmSection,
    StoppingSection as StoppingSection,
    TpuSection as TpuSection,
)
from accelerate.settings.sections.precision import (
    BACKENDS as BACKENDS,
    PRECISIONS as PRECISIONS,
    AmaxComputeAlgorithm as AmaxComputeAlgorithm,
    DynamoSection as DynamoSection,
    FP8Format as FP8Format,
    Fp8Section as Fp8Section,
    OptLevel as OptLevel,
    PrecisionSection as PrecisionSection,
)
from accelerate.settings.sections.strategies import (
    DEVICES as DEVICES,
    ContextParallelSection as ContextParallelSection,
    DeepSpeedSection as DeepSpeedSection,
    FsdpSection as FsdpSection,
    MegatronSection as MegatronSection,
    OffloadDevice as OffloadDevice,
    ParallelismSection as ParallelismSection,
    PipelineSection as PipelineSection,
    SequenceParallelSection as SequenceParallelSection,
)
