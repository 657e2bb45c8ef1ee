"""AcceleratorState: the number format and plugins of a run, on top of PartialState."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError, DistributedType, StateError
from accelerate.devices import CpuBackend, hardware_table
from accelerate.state import (
    AcceleratorState,
    PartialState,
    accelerator_state as module,
    deepspeed_required,
    is_initialized,
)

pytestmark = pytest.mark.usefixtures("states")


def build(**arguments: Any) -> AcceleratorState:
    return AcceleratorState(**{"cpu": True, "_from_accelerator": True, **arguments})


class DeepSpeed:
    """The interface of a DeepSpeed plugin for the state."""

    def __init__(self, config: dict[str, Any] | None = None, selected: bool = False) -> None:
        self.deepspeed_config = config or {}
        self.selected = selected

    def select(self, _from_accelerator_state: bool = False) -> None:
        assert _from_accelerator_state
        self.selected = True

    def _unselect(self) -> None:
        self.selected = False


def test_only_an_accelerator_initializes_the_state() -> None:
    with pytest.raises(ValueError, match="no `Accelerator` was built yet"):
        AcceleratorState()
    assert AcceleratorState._shared_state == {}
    assert not is_initialized()


def test_the_state_has_the_expected_keys() -> None:
    state = build()
    assert is_initialized()
    assert state.__dict__ is AcceleratorState._shared_state
    added = {
        "deepspeed_plugins",
        "torch_tp_plugin",
        "parallelism_config",
        "device_mesh",
        "dynamo_plugin",
        "_mixed_precision",
    }
    assert set(state.__dict__) == set(PartialState._shared_state) | added
    assert state.deepspeed_plugin is None
    assert (state.device_mesh, state.parallelism_config, state.torch_tp_plugin) == (None, None, None)
    assert not hasattr(state, "fsdp_plugin")
    assert not hasattr(state, "megatron_lm_plugin")
    assert AcceleratorState().num_processes == 1
    assert (state.use_distributed, state.fork_launched, state.is_fsdp2) == (False, False, False)
    assert state.is_main_process
    assert str(state) == repr(state) == f"{PartialState()!r}\nMixed precision type: no\n"


@pytest.mark.parametrize("value", ["no", "fp16", "bf16", "fp8", "BF16"])
def test_precisions_are_accepted_in_any_case(value: str) -> None:
    assert build(mixed_precision=value).mixed_precision == value.lower()


@pytest.mark.parametrize(
    ("argument", "own", "bare", "expected"),
    [
        (None, None, None, "no"),
        (None, "bf16", None, "bf16"),
        (None, None, "fp16", "fp16"),
        (None, "bf16", "fp16", "bf16"),
        ("no", "bf16", "fp16", "no"),
        (None, "", "fp16", "fp16"),
    ],
)
def test_the_number_format_is_that_of_the_argument_or_the_variables(
    monkeypatch: pytest.MonkeyPatch, argument: str | None, own: str | None, bare: str | None, expected: str
) -> None:
    for name, value in (("ACCELERATE_MIXED_PRECISION", own), ("MIXED_PRECISION", bare)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert build(mixed_precision=argument).mixed_precision == expected


def test_an_unknown_number_format_names_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision='fp12'.*no, fp8, fp16, bf16"):
        build(mixed_precision="fp12")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "half")
    with pytest.raises(ConfigurationError, match="ACCELERATE_MIXED_PRECISION='half'"):
        build()
    assert AcceleratorState._shared_state == {}


def test_a_format_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "supports", lambda row, dtype: dtype != torch.bfloat16)
    with pytest.raises(
        ConfigurationError, match="mixed_precision='bf16': this CPU does not compute in bfloat16"
    ):
        build(mixed_precision="bf16")
    assert build(mixed_precision="fp16").mixed_precision == "fp16"


def test_a_second_run_with_other_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(mixed_precision="bf16")
    build(mixed_precision="bf16")
    build(mixed_precision="BF16")
    build(mixed_precision=None)
    with pytest.raises(ValueError, match="mixed_precision='no': this process already runs with"):
        build(mixed_precision="no")
    state._check_initialized(mixed_precision="bf16", cpu=True)
    monkeypatch.setitem(AcceleratorState._shared_state, "device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match="cpu=True: this process already runs on cuda:0"):
        build()


def test_plugins_label_the_run() -> None:
    plugin = SimpleNamespace(fsdp_version=2)
    state = build(fsdp_plugin=plugin, dynamo_plugin="dynamo")
    assert state.fsdp_plugin is plugin
    assert state.distributed_type == DistributedType.FSDP
    assert state.is_fsdp2
    assert state.dynamo_plugin == "dynamo"
    assert PartialState().distributed_type == DistributedType.NO
    AcceleratorState._reset_state()
    assert build(megatron_lm_plugin=plugin).distributed_type == DistributedType.MEGATRON_LM
    AcceleratorState._reset_state()
    plugin.fsdp_version = 1
    assert not build(fsdp_plugin=plugin).is_fsdp2


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, "no"), ({"fp16": {"enabled": True}}, "fp16"), ({"bf16": {"enabled": True}}, "bf16")],
)
def test_deepspeed_decides_the_number_format(config: dict[str, Any], expected: str) -> None:
    plugin = DeepSpeed(config)
    state = build(deepspeed_plugin=plugin)
    assert state.deepspeed_plugin is plugin
    assert state.distributed_type == DistributedType.DEEPSPEED
    assert state.mixed_precision == expected


def test_one_of_several_deepspeed_plugins() -> None:
    student, teacher = DeepSpeed(selected=True), DeepSpeed()
    state = build(deepspeed_plugin={"student": student, "teacher": teacher})
    assert state.deepspeed_plugin is student
    state.select_deepspeed_plugin("teacher")
    assert state.deepspeed_plugin is teacher
    assert state.get_deepspeed_plugin("student") is student
    state.select_deepspeed_plugin()
    assert state.deepspeed_plugin is student
    with pytest.raises(ConfigurationError, match="student, teacher"):
        state.select_deepspeed_plugin("assistant")
    student._unselect()
    with pytest.raises(StateError, match="0 are selected"):
        _ = state.deepspeed_plugin


def test_selecting_without_deepspeed_plugins_is_an_error() -> None:
    with pytest.raises(StateError, match="no DeepSpeed plugins"):
        build(deepspeed_plugin=DeepSpeed()).select_deepspeed_plugin("default")


def test_deepspeed_required() -> None:
    @deepspeed_required
    def stage() -> int:
        """Stage."""
        return 3

    assert stage.__doc__ == "Stage."
    with pytest.raises(StateError, match="`stage` works with DeepSpeed only"):
        stage()
    build(deepspeed_plugin=DeepSpeed())
    assert stage() == 3


@pytest.mark.parametrize(("downcast", "variables"), [("false", ("1", "0")), ("true", ("0", "1"))])
@pytest.mark.parametrize("name", ["ACCELERATE_DOWNCAST_BF16", "XLA_DOWNCAST_BF16"])
def test_bfloat16_on_xla(
    monkeypatch: pytest.MonkeyPatch, name: str, downcast: str, variables: tuple[str, str]
) -> None:
    monkeypatch.setattr(hardware_table, "CPU", replace(hardware_table.CPU, own_runtime=True))
    monkeypatch.setenv(name, downcast)  # the second one is the launcher's
    published: dict[str, str] = {}
    monkeypatch.setattr(module.environ, "assign", published.update)
    state = build(mixed_precision="bf16")
    assert state.downcast_bfloat == (downcast == "true")
    assert (published["XLA_USE_BF16"], published["XLA_DOWNCAST_BF16"]) == variables
