"""FP8 recipes: one class for each library that computes in FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from accelerate.base import current, is_msamp_available, parse_flag_from_env, require, wrong_value
from accelerate.devices import is_transformer_engine_available
from accelerate.plugins.checks import at_least, one_of
from accelerate.plugins.handlers import KwargsHandler
from accelerate.settings import decode
from accelerate.settings.sections import Fp8Section

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]

# The one field that no flag of the launcher sets.
_MXFP8_VARIABLE = "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
_AO_FIELDS = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
_TE_FIELDS = (
    "use_autocast_during_eval",
    "margin",
    "interval",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "override_linear_precision",
)


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao trains in FP8.

    What is not given is read from the environment when the object is built.

    Args:
        config: torchao's own configuration; without it one is built from the two flags.
        module_filter_func: Called with a linear layer and its name: whether the layer is converted; None
            converts all but the first and the last.
        pad_inner_dim: Whether sizes that FP8 kernels cannot take are padded. From
            ACCELERATE_FP8_PAD_INNER_DIM, otherwise yes.
        enable_fsdp_float8_all_gather: Whether sharded weights travel in FP8. From
            ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER, otherwise yes.

    Raises:
        ConfigurationError: Both a configuration and one of its flags are given.
        MissingPackageError: A configuration has to be built and torchao is not installed.
    """

    config: Float8LinearConfig | None = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if self.config is None:
            self.fill(_variables(*_AO_FIELDS))
            require("torchao", "AORecipeKwargs")
            from torchao.float8 import Float8LinearConfig

            self.config = Float8LinearConfig(**{name: getattr(self, name) for name in _AO_FIELDS})
            return
        for name in _AO_FIELDS:
            if (value := getattr(self, name)) is not None:
                reason = "the config given beside it decides this"
                raise wrong_value(name, value, reason, "Set it in the config")
        self.fill(_variables(*_AO_FIELDS))


@dataclass
class TERecipeKwargs(KwargsHandler):
    """How Transformer Engine trains in FP8.

    What is not given is read from the environment when the object is built: each field from the variable
    ACCELERATE_FP8_ with its name in capitals, and `override_linear_precision` from
    ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD.

    Args:
        use_autocast_during_eval: Whether evaluation runs in FP8 too; otherwise no.
        margin: Margin of the scaling factor; otherwise 0.
        interval: Steps between two computations of the scaling factor; otherwise 1.
        fp8_format: "E4M3", "E5M2", or "HYBRID": E4M3 forward and E5M2 backward; otherwise "HYBRID".
        amax_history_len: Number of steps whose maxima are kept; otherwise 1024.
        amax_compute_algo: "max" of the kept maxima, or the "most_recent"; otherwise "most_recent".
        override_linear_precision: Whether forward, gradient of inputs and gradient of weights run in higher
            precision; otherwise none of them.
        use_mxfp8_block_scaling: Whether blocks of values have a scale each (MXFP8); otherwise no.

    Raises:
        ConfigurationError: A value that Transformer Engine does not know, or a number that is too small.
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
        self.fp8_format = _upper(self.fp8_format)
        self.fill(_variables(*_TE_FIELDS))
        self.fill({"use_mxfp8_block_scaling": parse_flag_from_env(_MXFP8_VARIABLE)})
        one_of("fp8_format", self.fp8_format, get_args(FP8Format))
        one_of("amax_compute_algo", self.amax_compute_algo, get_args(AmaxComputeAlgorithm))
        for name, minimum in (("margin", 0), ("interval", 1), ("amax_history_len", 1)):
            at_least(name, getattr(self, name), minimum)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """How MS-AMP trains in FP8.

    Args:
        opt_level: "O1": weights and gradients, "O2": optimizer states too. From ACCELERATE_FP8_OPT_LEVEL,
            otherwise "O2".

    Raises:
        ConfigurationError: Another level.
    """

    opt_level: OptLevel | None = None

    def __post_init__(self) -> None:
        self.fill(_variables("opt_level"))
        one_of("opt_level", self.opt_level, get_args(OptLevel))


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipes of Transformer Engine and MS-AMP in one, as older scripts pass them.

    New scripts pass `TERecipeKwargs` or `MSAMPRecipeKwargs`.

    Args:
        backend: "TE" or "MSAMP". From ACCELERATE_FP8_BACKEND, otherwise MS-AMP where only that is installed,
            and Transformer Engine elsewhere.

    Raises:
        ConfigurationError: Another backend, or what the two recipes refuse.
    """

    backend: Backend | None = None

    def __post_init__(self) -> None:
        self.fill(_variables("backend"))
        self.backend = _upper(self.backend) or _installed_backend()
        one_of("backend", self.backend, get_args(Backend))
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)


def _variables(*fields: str) -> dict[str, Any]:
    """Return what the environment says, or by default holds, for fields of a recipe."""
    section = decode(Fp8Section, current())
    return {field: getattr(section, f"fp8_{field.removeprefix('fp8_')}") for field in fields}


def _installed_backend() -> Backend:
    return "MSAMP" if is_msamp_available() and not is_transformer_engine_available() else "TE"


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value
