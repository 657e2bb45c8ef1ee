from accelerate.strategies.pipeline.axis import KeptStructures as KeptStructures, PipelineAxis as PipelineAxis
from accelerate.strategies.pipeline.runner import Pipeline as Pipeline
from accelerate.strategies.pipeline.state import PipelineState as PipelineState
from accelerate.strategies.pipeline.verification import Verification as Verification
