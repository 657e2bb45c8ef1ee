"""Sections for mixed precision, FP8 recipes, and torch.compile."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

from accelerate.base import TORCH_DYNAMO_MODES, DynamoBackend, shown, str_to_bool
from accelerate.settings.option import Section, as_bit, option, optional, true_or_false, upper
from accelerate.settings.sections.launch import RESOURCES

PRECISIONS = ("no", "fp16", "bf16", "fp8")
FP8Format: TypeAlias = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm: TypeAlias = Literal["max", "most_recent"]
OptLevel: TypeAlias = Literal["O1", "O2"]


def _three_choices(text: str) -> tuple[bool, bool, bool]:
    """Reads ``true,false,true`` for forward product, gradient of the data, and gradient of the weights."""
    try:
        fprop, dgrad, wgrad = (bool(str_to_bool(part.strip())) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{shown(text)} must be three words like true,false,true") from None
    return fprop, dgrad, wgrad


@dataclass(frozen=True, kw_only=True)
class PrecisionSection(Section):
    """Mixed precision of the forward pass."""

    title = RESOURCES
    env_prefix = "ACCELERATE_"

    mixed_precision: str = option(
        "no",
        "Mixed precision of the forward: no (dtype of the model), fp16, bf16 or fp8.",
        choices=PRECISIONS,
        flag_default=None,
        aliases=("MIXED_PRECISION",),
        ask="Which mixed precision?",
    )


_te_option = partial(option, when=lambda answers: answers["fp8_backend"] == "te")
_ao_option = partial(
    option,
    flag_default="true",
    flag_type=true_or_false,
    encode=as_bit,
    ask=True,
    when=lambda answers: answers["fp8_backend"] == "ao",
)


@dataclass(frozen=True, kw_only=True)
class Fp8Section(Section):
    """The FP8 recipe."""

    title = "FP8 Arguments"
    file_key = "fp8_config"
    field_prefix = "fp8_"
    switch = "--mixed_precision fp8"
    key_prefix = "fp8_"
    env_prefix = "ACCELERATE_"

    fp8_backend: str | None = optional(
        "Library that computes in FP8: ao (torchao), te (Transformer Engine) or msamp (MS-AMP).",
        choices=("ao", "te", "msamp"),
        ask="Which library computes in FP8?",
    )
    fp8_use_autocast_during_eval: bool = _te_option(
        False, "Transformer Engine: compute in FP8 during evaluation too.", ask=True
    )
    fp8_margin: int = _te_option(
        0,
        "Transformer Engine: margin of the scaling factor.",
        ask="What is the margin of the scaling factor?",
    )
    fp8_interval: int = _te_option(
        1,
        "Transformer Engine: steps between two scaling factors.",
        ask="How many steps between two scaling factors?",
    )
    fp8_format: str = _te_option(
        "HYBRID",
        "Transformer Engine: E4M3, E5M2, or HYBRID (E4M3 forward, E5M2 backward).",
        choices=get_args(FP8Format),
        key="fp8_format",
        field="fp8_format",
        encode=upper,
        ask="Which FP8 format?",
    )
    fp8_amax_history_len: int = _te_option(
        1024,
        "Transformer Engine: how many maxima a scaling factor looks back on.",
        key="amax_history_length",
        ask="How many maxima does a scaling factor look back on?",
    )
    fp8_amax_compute_algo: str = _te_option(
        "most_recent",
        "Transformer Engine: scaling from the largest or the most recent maximum.",
        choices=get_args(AmaxComputeAlgorithm),
        key="amax_compute_algorithm",
        ask=True,
    )
    fp8_override_linear_precision: tuple[bool, bool, bool] = option(
        (False, False, False),
        "Transformer Engine: products kept in higher precision, as three words: forward,dgrad,wgrad.",
        flag_type=_three_choices,
        env=(
            "ACCELERATE_FP8_OVERRIDE_FPROP",
            "ACCELERATE_FP8_OVERRIDE_DGRAD",
            "ACCELERATE_FP8_OVERRIDE_WGRAD",
        ),
    )
    fp8_opt_level: str = option(
        "O2",
        "MS-AMP: how much is kept in FP8: O1 (communication) or O2 (optimizer states too).",
        choices=get_args(OptLevel),
        key="optimization_level",
        ask="How much is kept in FP8 (O1: communication, O2: optimizer states too)?",
        when=lambda answers: answers["fp8_backend"] == "msamp",
    )
    fp8_enable_fsdp_float8_all_gather: bool = _ao_option(True, "torchao: gather FSDP2 parameters in FP8.")
    fp8_pad_inner_dim: bool = _ao_option(
        True, "torchao: pad matrices whose inner size is not a multiple of 16."
    )

    @classmethod
    def active(cls, values: Mapping[str, Any]) -> bool:
        """Returns whether mixed precision is FP8."""
        return bool(values["mixed_precision"] == "fp8")


_NAMES = tuple(name.lower() for name in DynamoBackend.list())
_XLA = _NAMES.index("torchxla_trace_once")
BACKENDS = (*_NAMES[:_XLA], "torhchxla_trace_once", *_NAMES[_XLA:])
"""The backends of `torch.compile`, and a misspelt name of one of them, which older files have."""


_detail = partial(option, advanced=True, when=lambda answers: answers["dynamo_backend"] != "no")


@dataclass(frozen=True, kw_only=True)
class DynamoSection(Section):
    """Compilation of prepared models with torch.compile."""

    title = RESOURCES
    file_key = "dynamo_config"
    field_prefix = "dynamo_"
    env_prefix = "ACCELERATE_"

    dynamo_backend: str = option(
        "no",
        "Compiler of torch.compile; no leaves models as they are.",
        choices=BACKENDS,
        flag_default=None,
        encode=upper,
        ask="Which torch.compile backend (no for none)?",
        advanced=True,
    )
    dynamo_mode: str = _detail(
        "default",
        "What torch.compile optimises for.",
        choices=tuple(TORCH_DYNAMO_MODES),
        ask="What does torch.compile optimise for?",
    )
    dynamo_use_fullgraph: bool = _detail(
        False, "Refuse models that do not compile to one graph.", field="fullgraph", ask=True
    )
    dynamo_use_dynamic: bool = _detail(False, "Compile for changing shapes.", field="dynamic", ask=True)
    dynamo_use_regional_compilation: bool = _detail(
        False, "Compile each repeated block once instead of the whole model.", ask=True
    )
