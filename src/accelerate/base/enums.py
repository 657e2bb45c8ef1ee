"""Enumerations that users pass to functions or compare with.

Members that mix in `str` equal their plain string; compare with `==`, because other libraries assign
plain strings. Where plain strings are accepted too, a `Literal` below the enumeration lists them for type
checkers.
"""

from enum import Enum, EnumMeta
from typing import Any, Literal, TypeAlias


def plain_value(value: object) -> Any:
    """Returns the plain string or number of an enumeration member or a subclass of `str`.

    Libraries pass choices as members of their own enumerations, and `str()` of those gives the class name.
    """
    if isinstance(value, Enum) and isinstance(value.value, str):
        return plain_value(value.value)
    if isinstance(value, Enum) and isinstance(value, int):
        return int(value)
    return str.__str__(value) if isinstance(value, str) else value


class EnumWithContains(EnumMeta):
    """Metaclass whose `in` tests for a value, as in `"fp16" in PrecisionType`, on every supported Python."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """Enumeration that prints as its value and lists its values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Returns the values of all members in the order of their declaration."""
        return [member.value for member in cls]


class DistributedType(str, Enum):
    """Type of the distributed setup, as `PartialState.distributed_type` reports it."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class SageMakerDistributedType(str, Enum):
    """Type of parallelism within an Amazon SageMaker job."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(str, Enum):
    """Library that computes in FP8."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class ComputeEnvironment(str, Enum):
    """Environment in which a run takes place."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Backend of `torch.compile`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


DynamoName: TypeAlias = Literal[
    Literal["no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs"],
    Literal["ofi", "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"],
    Literal["hpu_backend", "neuron"],
    Literal["NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS"],
    Literal["OFI", "FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM"],
    Literal["HPU_BACKEND", "NEURON"],
]


class LoggerType(BaseEnum):
    """Experiment tracker."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """Mixed-precision dtype."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


PrecisionName: TypeAlias = Literal["no", "fp8", "fp16", "bf16"]


class RNGType(BaseEnum):
    """Random number generator that processes can synchronize."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


RNGName: TypeAlias = Literal[
    "torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator"
]


class CustomDtype(Enum):
    """Storage dtype of quantized weights that torch has no dtype for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(BaseEnum):
    """Communication hook that compresses gradients under DistributedDataParallel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


CommunicationHookName: TypeAlias = Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
