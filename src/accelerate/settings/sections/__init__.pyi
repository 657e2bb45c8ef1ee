from accelerate.settings.sections.deepspeed import (
    DEVICES as DEVICES,
    DeepSpeedSection as DeepSpeedSection,
    OffloadDevice as OffloadDevice,
)
from accelerate.settings.sections.diagnostics import (
    DiagnosticsSection as DiagnosticsSection,
    StoppingSection as StoppingSection,
)
from accelerate.settings.sections.dynamo import BACKENDS as BACKENDS, DynamoSection as DynamoSection
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
    PRECISIONS as PRECISIONS,
    Fp8Section as Fp8Section,
    PrecisionSection as PrecisionSection,
)
from accelerate.settings.sections.rendezvous import (
    MpirunSection as MpirunSection,
    RendezvousSection as RendezvousSection,
    SlurmSection as SlurmSection,
)
from accelerate.settings.sections.sagemaker import SageMakerSection as SageMakerSection
from accelerate.settings.sections.tpu import TpuSection as TpuSection
