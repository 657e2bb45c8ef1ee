"""Recipes of the libraries that train in FP8, and the configuration of quantization by bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from accelerate.base import (
    ConfigurationError,
    CustomDtype,
    is_msamp_available,
    parse_flag_from_env,
    require,
    wrong_value,
)
from accelerate.devices import is_transformer_engine_available
from accelerate.plugins.checks import at_least, check_choices, fill, fill_from, one_of, plain_fields
from accelerate.plugins.handlers import KwargsHandler
from accelerate.settings.sections import AmaxComputeAlgorithm, FP8Format, Fp8Section, OptLevel

if TYPE_CHECKING:
    import torch
    from torchao.float8 import Float8LinearConfig

Backend = Literal["MSAMP", "TE"]

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Short names -> dtypes of torch."""

# The launcher has no flag for this field.
_MXFP8_VARIABLE = "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
_AO_FIELDS = ("pad_inner_dim", "enable_fsdp_float8_all_gather")


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Recipe of FP8 training with torchao.

    Fields that are None are read from the environment when the object is built.

    Args:
        config: Configuration of torchao. None builds one from the two flags.
        module_filter_func: Function that is called with a linear layer and its name, and returns whether the
            layer is converted. None converts all layers except the first and the last.
        pad_inner_dim: Whether sizes that FP8 kernels do not support are padded. From
            ACCELERATE_FP8_PAD_INNER_DIM, otherwise True.
        enable_fsdp_float8_all_gather: Whether sharded weights are all-gathered in FP8. From
            ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER, otherwise True.

    Raises:
        ConfigurationError: Both a configuration and one of its flags are given.
        MissingPackageError: The configuration must be built and torchao is not installed.
    """

    config: Float8LinearConfig | None = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        for name in _AO_FIELDS if self.config is not None else ():
            if (value := getattr(self, name)) is not None:
                reason = "the config that is passed too contains it"
                raise wrong_value(name, value, reason, "Set it in the config")
        fill_from(self, Fp8Section)
        if self.config is None:
            require("torchao", "AORecipeKwargs")
            from torchao.float8 import Float8LinearConfig

            self.config = Float8LinearConfig(**{name: getattr(self, name) for name in _AO_FIELDS})


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Recipe of FP8 training with Transformer Engine.

    Fields that are None are read from the environment when the object is built. The variable of a field is
    ACCELERATE_FP8_ with its name in capitals. `override_linear_precision` is read from
    ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD.

    Args:
        use_autocast_during_eval: Whether evaluation runs in FP8, too. Default: False.
        margin: Margin of the scaling factor. Default: 0.
        interval: Number of steps between two computations of the scaling factor. Default: 1.
        fp8_format: "E4M3", "E5M2", or "HYBRID" for E4M3 in forward and E5M2 in backward. Default: "HYBRID".
        amax_history_len: Number of steps whose maxima are kept. Default: 1024.
        amax_compute_algo: "max" of the kept maxima, or "most_recent". Default: "most_recent".
        override_linear_precision: Whether forward, gradient of inputs and gradient of weights run in higher
            precision. Default: none of them.
        use_mxfp8_block_scaling: Whether each block of values has its own scale (MXFP8). Default: False.

    Raises:
        ConfigurationError: Transformer Engine does not support a value, or a number is too small.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: FP8Format | None = None
    amax_history_len: int | None = None
    amax_compute_algo: AmaxComputeAlgorithm | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        self.fp8_format = _upper(self.fp8_format)
        fill_from(self, Fp8Section)
        fill(self, {"use_mxfp8_block_scaling": parse_flag_from_env(_MXFP8_VARIABLE)})
        check_choices(self, Fp8Section, "fp8_format", "amax_compute_algo")
        for name, minimum in (("margin", 0), ("interval", 1), ("amax_history_len", 1)):
            at_least(name, getattr(self, name), minimum)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Recipe of FP8 training with MS-AMP.

    Args:
        opt_level: "O1" for weights and gradients in FP8, "O2" for optimizer states, too. From
            ACCELERATE_FP8_OPT_LEVEL, otherwise "O2".

    Raises:
        ConfigurationError: The level is unknown.
    """

    opt_level: OptLevel | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        fill_from(self, Fp8Section)
        check_choices(self, Fp8Section, "opt_level")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Recipe of both Transformer Engine and MS-AMP, in the form that older scripts pass.

    New scripts pass `TERecipeKwargs` or `MSAMPRecipeKwargs`.

    Args:
        backend: "TE" or "MSAMP". From ACCELERATE_FP8_BACKEND, otherwise "MSAMP" if only MS-AMP is installed,
            and "TE" otherwise.

    Raises:
        ConfigurationError: The backend is unknown, or one of the two recipes refuses a value.
    """

    backend: Backend | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        fill_from(self, Fp8Section)
        has_only_msamp = is_msamp_available() and not is_transformer_engine_available()
        self.backend = _upper(self.backend) or ("MSAMP" if has_only_msamp else "TE")
        one_of("backend", self.backend, get_args(Backend))
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)


def _upper(value: object) -> Any:
    return value.upper() if isinstance(value, str) else value


@dataclass
class BnbQuantizationConfig:
    """Configuration of quantization by bitsandbytes.

    Args:
        load_in_8bit: Whether to quantize linear layers to 8 bits (LLM.int8()).
        llm_int8_threshold: Threshold above which inputs are multiplied in 16 bits, with 8 bits.
        load_in_4bit: Whether to quantize linear layers to 4 bits.
        bnb_4bit_quant_type: Data type of the weights with 4 bits, "fp4" or "nf4".
        bnb_4bit_use_double_quant: Whether to quantize the scales, too, with 4 bits.
        bnb_4bit_compute_dtype: Dtype of the computation with 4 bits, as "fp32", "fp16", "bf16" or a torch
            dtype.
        torch_dtype: Dtype of all tensors that are not quantized, with the same names. None uses the compute
            dtype with 4 bits and float16 with 8 bits.
        skip_modules: Names of modules that are not quantized. None selects the output layer and tied layers.
        keep_in_fp32_modules: Names of modules that are not quantized and are kept in float32.

    Attributes:
        target_dtype: Dtype of the quantized weights, `CustomDtype.INT4` for 4 bits.

    Raises:
        ConfigurationError: A value is not valid, or not exactly one of 8 and 4 bits is selected.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"  # torch's dtype after construction
    torch_dtype: str | torch.dtype | None = None  # torch's dtype after construction
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        import torch

        plain_fields(self)
        self._check()
        self.bnb_4bit_compute_dtype = _dtype_of("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = _dtype_of("torch_dtype", self.torch_dtype)
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    @property
    def unquantized_modules(self) -> list[str]:
        """Names of the modules that the user excludes from quantization."""
        return [*(self.skip_modules or ()), *(self.keep_in_fp32_modules or ())]

    def _check(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(value := getattr(self, name), bool):
                raise wrong_value(name, value, "it is not a boolean", "Give True or False")
        if self.load_in_8bit == self.load_in_4bit:
            problem = "can't be both True" if self.load_in_8bit else "are both False"
            raise ConfigurationError(
                f"load_in_8bit and load_in_4bit {problem}: a model is quantized to one of them. "
                f"Set {'only ' if self.load_in_8bit else ''}one of them to True."
            )
        threshold = self.llm_int8_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise wrong_value("llm_int8_threshold", threshold, "it is not a number", "Give one, such as 6.0")
        one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4"))
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise wrong_value(name, value, "it is not a list", "Give a list of names of modules")


def _dtype_of(name: str, value: object) -> torch.dtype:
    import torch

    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        fix = f"Give a torch dtype, or one of {', '.join(_DTYPES)}"
        raise wrong_value(name, value, "it is not a dtype", fix)
    return getattr(torch, _DTYPES[one_of(name, value, _DTYPES)])  # type: ignore[no-any-return]
