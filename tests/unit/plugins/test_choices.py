"""Choices that are strings are accepted as members of enumerations of other libraries, too."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
import yaml

from accelerate import Accelerator, infer_auto_device_map, load_checkpoint_and_dispatch
from accelerate.base import patch_environment, plain_value
from accelerate.commands.config.default import write_basic_config
from accelerate.launchers import notebook_launcher
from accelerate.logging import get_logger
from accelerate.ops import reduce
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import (
    BnbQuantizationConfig,
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
)
from accelerate.rng import synchronize_rng_states
from accelerate.state import AcceleratorState, PartialState

pytestmark = pytest.mark.usefixtures("states")


def foreign_member(text: str) -> Any:
    """Return a member of a `(str, Enum)` class; its `str()` is the name of the class and the member."""
    return Enum("Choice", {"MEMBER": text}, type=str).MEMBER  # type: ignore[call-overload]


class WithText(str, Enum):
    """As `enum.StrEnum`, which Python 3.10 has not."""

    __str__ = str.__str__


def text_member(text: str) -> Any:
    return WithText("TextChoice", {"MEMBER": text}).MEMBER  # type: ignore[attr-defined, call-arg]


class Text(str):
    """A string whose `str()` is another text."""

    def __str__(self) -> str:
        return f"<{str.__str__(self)}>"


def plugin(kind: type[Any], field: str, **others: Any) -> Callable[[Any], Any]:
    return lambda value: getattr(kind(**{field: value}, **others), field)


def fsdp(field: str, version: int = 1) -> Callable[[Any], Any]:
    return plugin(FullyShardedDataParallelPlugin, field, fsdp_version=version)


def accelerator(field: str, read: Callable[[Accelerator], Any]) -> Callable[[Any], Any]:
    def build(value: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return read(Accelerator(cpu=True, project_dir="unused", **{field: value}))

    return build


def state(value: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState(mixed_precision=value, cpu=True, _from_accelerator=True)
    return AcceleratorState(mixed_precision=value).mixed_precision


def set_state_dict_type(value: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_state_dict_type(value)
    return plugin.state_dict_type


def set_fsdp_precision(value: Any) -> Any:
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(value)
    return plugin.mixed_precision_policy


def set_deepspeed_precision(value: Any) -> Any:
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(value)
    return plugin.deepspeed_config["bf16"]


def reduce_once(value: Any) -> float:
    PartialState(cpu=True)
    return float(reduce(torch.tensor(2.0), reduction=value))


def synchronize(value: Any) -> None:
    PartialState(cpu=True)
    synchronize_rng_states([value])


def map_devices(value: Any) -> Any:
    return infer_auto_device_map(torch.nn.Linear(4, 4), {"cpu": 10**6}, dtype=value)


def offload_config(value: Any) -> Any:
    config = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device=value).deepspeed_config
    return yaml.safe_dump(config["zero_optimization"])


CHOICES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Accelerator mixed_precision": (accelerator("mixed_precision", lambda it: it.mixed_precision), "bf16"),
    "Accelerator dynamo_backend": (
        accelerator("dynamo_backend", lambda it: it.state.dynamo_plugin.backend),
        "inductor",
    ),
    "Accelerator log_with": (accelerator("log_with", lambda it: it.log_with), "tensorboard"),
    "Accelerator step policy": (
        accelerator("step_scheduler_with_optimizer", lambda it: it.step_scheduler_with_optimizer),
        "per_update",
    ),
    "AcceleratorState mixed_precision": (state, "bf16"),
    "dynamo backend": (plugin(TorchDynamoPlugin, "backend"), "aot_eager"),
    "dynamo mode": (plugin(TorchDynamoPlugin, "mode"), "reduce-overhead"),
    "fsdp version": (plugin(FullyShardedDataParallelPlugin, "fsdp_version"), "2"),
    "sharding_strategy": (fsdp("sharding_strategy"), "full_shard"),
    "sharding_strategy with ZeRO 2": (fsdp("sharding_strategy"), "hybrid_shard_zero2"),
    "reshard_after_forward": (fsdp("reshard_after_forward"), "SHARD_GRAD_OP"),
    "reshard_after_forward of FSDP 2": (fsdp("reshard_after_forward", 2), "false"),
    "backward_prefetch": (fsdp("backward_prefetch"), "backward_pre"),
    "no backward_prefetch": (fsdp("backward_prefetch"), "no_prefetch"),
    "state_dict_type": (fsdp("state_dict_type"), "sharded_state_dict"),
    "set_state_dict_type": (set_state_dict_type, "full_state_dict"),
    "auto_wrap_policy": (fsdp("auto_wrap_policy"), "transformer_based_wrap"),
    "mixed_precision_policy": (fsdp("mixed_precision_policy"), "bf16"),
    "fsdp set_mixed_precision": (set_fsdp_precision, "bf16"),
    "activation_checkpointing": (fsdp("activation_checkpointing"), "true"),
    "offload_optimizer_device": (offload_config, "cpu"),
    "offload_param_device": (plugin(DeepSpeedPlugin, "offload_param_device", zero_stage=3), "cpu"),
    "msamp_opt_level": (plugin(DeepSpeedPlugin, "msamp_opt_level"), "O2"),
    "deepspeed set_mixed_precision": (set_deepspeed_precision, "bf16"),
    "comm_hook": (plugin(DistributedDataParallelKwargs, "comm_hook"), "fp16"),
    "comm_wrapper": (plugin(DistributedDataParallelKwargs, "comm_wrapper"), "bf16"),
    "process group backend": (plugin(InitProcessGroupKwargs, "backend"), "gloo"),
    "profiler activities": (lambda value: ProfileKwargs(activities=[value]).activities, "cpu"),
    "fp8_format": (plugin(TERecipeKwargs, "fp8_format"), "e4m3"),
    "amax_compute_algo": (plugin(TERecipeKwargs, "amax_compute_algo"), "max"),
    "opt_level": (plugin(MSAMPRecipeKwargs, "opt_level"), "O1"),
    "fp8 backend": (plugin(FP8RecipeKwargs, "backend"), "te"),
    "bnb_4bit_quant_type": (plugin(BnbQuantizationConfig, "bnb_4bit_quant_type", load_in_4bit=True), "nf4"),
    "bnb_4bit_compute_dtype": (
        plugin(BnbQuantizationConfig, "bnb_4bit_compute_dtype", load_in_4bit=True),
        "bf16",
    ),
    "cp_comm_strategy": (plugin(TorchContextParallelConfig, "cp_comm_strategy"), "alltoall"),
    "sp_attn_implementation": (
        plugin(DeepSpeedSequenceParallelConfig, "sp_attn_implementation"),
        "flash_attention_2",
    ),
    "cp_backend": (plugin(ParallelismConfig, "cp_backend"), "torch"),
    "megatron attention_backend": (plugin(MegatronLMPlugin, "attention_backend"), "flash"),
    "reduction": (reduce_once, "sum"),
    "rng_types": (synchronize, "torch"),
    "dtype of a device map": (map_devices, "float16"),
    "log level": (lambda value: get_logger("accelerate.choices", value).logger.level, "error"),
}


@pytest.mark.parametrize("kind", [foreign_member, text_member, Text])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_of_another_class_is_that_of_its_string(name: str, kind: Callable[[str], Any]) -> None:
    choose, text = CHOICES[name]
    expected, result = choose(text), choose(kind(text))
    assert result == expected
    assert type(result) is type(expected)
    assert f"{result}" == f"{expected}"


@pytest.mark.parametrize("kind", [foreign_member, text_member, Text])
def test_a_member_reaches_files_and_variables_as_its_text(kind: Callable[[str], Any], tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    write_basic_config(kind("bf16"), str(path))
    assert "mixed_precision: bf16" in path.read_text()
    with patch_environment(ACCELERATE_USE_CPU="true"):
        notebook_launcher(lambda: seen.append(Accelerator().mixed_precision), mixed_precision=kind("bf16"))
    assert seen.pop() == "bf16"


seen: list[str] = []


@pytest.mark.parametrize("kind", [foreign_member, text_member, Text])
def test_a_device_map_is_planned_by_the_method_of_a_member(kind: Callable[[str], Any], tmp_path: Any) -> None:
    model = torch.nn.Linear(4, 4)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load_checkpoint_and_dispatch(model, str(tmp_path), device_map=kind("auto"))
    assert loaded.hf_device_map == {"": "cpu"}


class Number(int, Enum):
    FULL_SHARD = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [(Number.FULL_SHARD, 1), (True, True), (None, None), (1.5, 1.5), (torch.float16, torch.float16)],
)
def test_other_values_are_kept(value: Any, expected: Any) -> None:
    assert plain_value(value) is expected


def test_a_strategy_is_given_by_the_number_of_a_member() -> None:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=Number.FULL_SHARD)
    assert plugin.sharding_strategy.name == "FULL_SHARD"
