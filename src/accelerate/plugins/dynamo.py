"""Arguments of torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from accelerate.base import DynamoBackend, DynamoName, environ
from accelerate.plugins.checks import member, one_of
from accelerate.plugins.handlers import KwargsHandler
from accelerate.settings import read
from accelerate.settings.sections import DynamoSection

_OPTIONS = {
    "backend": "dynamo_backend",
    "mode": "dynamo_mode",
    "fullgraph": "dynamo_use_fullgraph",
    "dynamic": "dynamo_use_dynamic",
    "use_regional_compilation": "dynamo_use_regional_compilation",
}
_OTHERWISE = {"backend": "no", "mode": "default", "fullgraph": False, "use_regional_compilation": False}
# A flag of the launcher has always been spelled this way.
_SPELLINGS = {"TORHCHXLA_TRACE_ONCE": "TORCHXLA_TRACE_ONCE"}
DynamoMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_TORCH_DEFAULTS: dict[str, Any] = {
    "mode": "default",
    "fullgraph": False,
    "dynamic": None,
    "options": None,
    "disable": False,
}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled with `torch.compile`.

    What is not given is read from the environment when the object is built.

    Args:
        backend: compiler; a member or its name in any case. From ACCELERATE_DYNAMO_BACKEND, otherwise none.
        mode: what the compiler optimises for. From ACCELERATE_DYNAMO_MODE, otherwise "default".
        fullgraph: whether a model that breaks into several graphs is an error. From
            ACCELERATE_DYNAMO_USE_FULLGRAPH.
        dynamic: whether shapes may change; None lets torch find out. From ACCELERATE_DYNAMO_USE_DYNAMIC.
        options: arguments of the compiler; torch takes either these or a mode.
        disable: whether compiling is switched off although a backend is set.
        use_regional_compilation: whether repeated blocks are compiled, once each kind, instead of the whole
            model. From ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION.

    Raises:
        ConfigurationError: an unknown backend or mode.
    """

    backend: DynamoBackend | DynamoName | None = None
    mode: DynamoMode | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        variables = read(environ.current(), (DynamoSection,))
        self.fill({name: variables[option] for name, option in _OPTIONS.items() if option in variables})
        self.fill(_OTHERWISE)
        spelled = str(self.backend).upper()
        self.backend = member("dynamo backend", _SPELLINGS.get(spelled, spelled), DynamoBackend)
        one_of("dynamo mode", self.mode, get_args(DynamoMode))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, the backend as torch spells it."""
        fields = super().to_dict()
        return {**fields, "backend": fields["backend"].value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults, always with the backend."""
        fields = self.to_dict()
        changed = {name: fields[name] for name, usual in _TORCH_DEFAULTS.items() if fields[name] != usual}
        return {"backend": fields["backend"], **changed}
