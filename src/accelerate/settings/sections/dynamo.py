"""torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.base import TORCH_DYNAMO_MODES, DynamoBackend
from accelerate.settings.option import Section, option, upper
from accelerate.settings.sections.launch import RESOURCES

_NAMES = tuple(name.lower() for name in DynamoBackend.list())
_XLA = _NAMES.index("torchxla_trace_once")
BACKENDS = (*_NAMES[:_XLA], "torhchxla_trace_once", *_NAMES[_XLA:])
"""The backends of `torch.compile`, and a misspelt name of one of them, which older files have."""


def _compiles(answers: Mapping[str, Any]) -> bool:
    return bool(answers["dynamo_backend"] != "no")


@dataclass(frozen=True, kw_only=True)
class DynamoSection(Section):
    """What torch.compile does with a prepared model."""

    title = RESOURCES
    file_key = "dynamo_config"
    env_prefix = "ACCELERATE_"

    dynamo_backend: str = option(
        "no",
        "Compiler of torch.compile; no leaves models as they are.",
        choices=BACKENDS,
        flag_default=None,
        spell=upper,
        ask="Which torch.compile backend (no for none)?",
        advanced=True,
    )
    dynamo_mode: str = option(
        "default",
        "What torch.compile optimises for.",
        choices=tuple(TORCH_DYNAMO_MODES),
        advanced=True,
        ask="What does torch.compile optimise for?",
        when=_compiles,
    )
    dynamo_use_fullgraph: bool = option(
        False, "Refuse models that do not compile to one graph.", advanced=True, ask=True, when=_compiles
    )
    dynamo_use_dynamic: bool = option(
        False, "Compile for changing shapes.", advanced=True, ask=True, when=_compiles
    )
    dynamo_use_regional_compilation: bool = option(
        False,
        "Compile each repeated block once instead of the whole model.",
        advanced=True,
        ask=True,
        when=_compiles,
    )
