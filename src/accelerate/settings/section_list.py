"""All sections, in the order of the help and of the documentation."""

from accelerate.settings.option import Section
from accelerate.settings.sections.deepspeed import DeepSpeedSection
from accelerate.settings.sections.diagnostics import DiagnosticsSection
from accelerate.settings.sections.dynamo import DynamoSection
from accelerate.settings.sections.fsdp import FsdpSection
from accelerate.settings.sections.launch import LaunchSection
from accelerate.settings.sections.megatron import MegatronSection
from accelerate.settings.sections.parallelism import (
    ContextParallelSection,
    ParallelismSection,
    SequenceParallelSection,
)
from accelerate.settings.sections.precision import Fp8Section, PrecisionSection
from accelerate.settings.sections.rendezvous import MpirunSection, RendezvousSection
from accelerate.settings.sections.sagemaker import SageMakerSection
from accelerate.settings.sections.slurm import SlurmSection
from accelerate.settings.sections.stopping import StoppingSection
from accelerate.settings.sections.tpu import TpuSection

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
