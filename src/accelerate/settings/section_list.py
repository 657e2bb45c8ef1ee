"""All sections, in the order of the help and of the documentation."""

from accelerate.settings.option import Section
from accelerate.settings.sections import (
    ContextParallelSection,
    DeepSpeedSection,
    DiagnosticsSection,
    DynamoSection,
    Fp8Section,
    FsdpSection,
    LaunchSection,
    MegatronSection,
    MpirunSection,
    ParallelismSection,
    PrecisionSection,
    RendezvousSection,
    SageMakerSection,
    SequenceParallelSection,
    SlurmSection,
    StoppingSection,
    TpuSection,
)

SECTIONS: tuple[type[Section], ...] = (
    LaunchSection,
    PrecisionSection,
    DynamoSection,
    RendezvousSection,
    TpuSection,
    DeepSpeedSection,
    FsdpSection,
    MegatronSection,
    Fp8Section,
    SageMakerSection,
    MpirunSection,
    SlurmSection,
    StoppingSection,
    ParallelismSection,
    ContextParallelSection,
    SequenceParallelSection,
    DiagnosticsSection,
)
