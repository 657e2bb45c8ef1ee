"""The arguments of torch.compile, given or from the environment."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError, DynamoBackend
from accelerate.plugins import TorchDynamoPlugin


def test_nothing_is_compiled_by_default() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend == DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic, plugin.use_regional_compilation) == (
        "default",
        False,
        None,
        False,
    )


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_a_backend_is_named_in_any_case(backend: str) -> None:
    plugin = TorchDynamoPlugin(backend=backend)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_dict()["backend"] == "inductor"
    assert plugin.to_kwargs() == {"backend": "inductor"}


def test_the_environment_fills_what_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BACKEND": "AOT_EAGER",
        "MODE": "reduce-overhead",
        "USE_FULLGRAPH": "True",
        "USE_DYNAMIC": "False",
        "USE_REGIONAL_COMPILATION": "1",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    plugin = TorchDynamoPlugin()
    assert plugin.to_kwargs() == {
        "backend": "aot_eager",
        "mode": "reduce-overhead",
        "fullgraph": True,
        "dynamic": False,
    }
    assert plugin.use_regional_compilation is True
    given = TorchDynamoPlugin(backend="eager", mode="default", fullgraph=False, dynamic=True)
    assert given.to_kwargs() == {"backend": "eager", "dynamic": True}


def test_options_are_passed_without_a_mode() -> None:
    options = {"max_autotune": True}
    kwargs = TorchDynamoPlugin(backend="inductor", options=options).to_kwargs()
    assert kwargs == {"backend": "inductor", "options": options}


def test_every_argument_is_one_of_torch_compile() -> None:
    plugin = TorchDynamoPlugin("eager", "max-autotune", True, True, {"a": 1}, True, True)
    assert set(plugin.to_kwargs()) <= set(inspect.signature(torch.compile).parameters)


@pytest.mark.parametrize(("wrong", "named"), [({"backend": "gcc"}, "GCC"), ({"mode": "fast"}, "fast")])
def test_unknown_choices_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{named}'"):
        TorchDynamoPlugin(**wrong)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "perhaps")
    with pytest.raises(ConfigurationError, match="ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        TorchDynamoPlugin()


def test_the_old_spelling_of_the_launcher_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "TORHCHXLA_TRACE_ONCE")
    assert TorchDynamoPlugin().backend == DynamoBackend.TORCHXLA_TRACE_ONCE
