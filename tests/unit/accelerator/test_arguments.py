"""Constructor arguments and environment, laid over each other and checked."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.accelerator import build_request
from accelerate.base import ConfigurationError, DynamoBackend, PrecisionType, RNGType
from accelerate.parallelism_config import ParallelismConfig
from accelerate.plugins import (
    ActivationCheckpointing,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.strategies import RunRequest

DEFAULTS = {name: parameter.default for name, parameter in signature(Accelerator).parameters.items()}
STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def passed(**given: Any) -> dict[str, Any]:
    return {**DEFAULTS, **given}


def build(arguments: dict[str, Any], environ: dict[str, str]) -> RunRequest:
    return build_request(environ, **arguments)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, None),
        ("bf16", {}, "bf16"),
        (PrecisionType.FP16, {}, "fp16"),
        ("BF16", {}, "bf16"),
        (None, {"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16"),
        (None, {"MIXED_PRECISION": "bf16"}, "bf16"),
        (None, {"ACCELERATE_MIXED_PRECISION": "no", "MIXED_PRECISION": "bf16"}, "no"),
        ("no", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "no"),
    ],
)
def test_the_argument_takes_precedence_over_variables_for_mixed_precision(
    given: Any, environ: dict[str, str], expected: str | None
) -> None:
    assert build(passed(mixed_precision=given), environ).mixed_precision == expected


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (passed(), {}, 1),
        (passed(gradient_accumulation_steps=3), {}, 3),
        (passed(), {STEPS: "4"}, 4),
        (passed(gradient_accumulation_steps=3), {STEPS: "4"}, 3),
        (passed(), {STEPS: "auto"}, 1),
        (passed(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=5)), {STEPS: "4"}, 5),
        (
            passed(gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True)),
            {STEPS: "4"},
            4,
        ),
    ],
)
def test_accumulation_steps(arguments: dict[str, Any], environ: dict[str, str], expected: int) -> None:
    request = build(arguments, environ)
    assert request.accumulation.num_steps == expected
    plugin = arguments["gradient_accumulation_plugin"]
    if plugin is not None:
        assert request.accumulation.sync_each_batch == plugin.sync_each_batch


def test_a_variable_of_an_older_launcher_is_noted() -> None:
    (note,) = build(passed(), {"ACCELERATE_USE_IPEX": "1"}).notes
    assert "Intel Extension for PyTorch is no longer used" in note


def test_a_disagreement_is_noted_with_both_sources() -> None:
    request = build(passed(mixed_precision="no"), {"ACCELERATE_MIXED_PRECISION": "bf16"})
    (note,) = request.notes
    assert "mixed_precision='no'" in note
    assert "ACCELERATE_MIXED_PRECISION='bf16'" in note
    assert build(passed(mixed_precision="bf16"), {"ACCELERATE_MIXED_PRECISION": "bf16"}).notes == ()


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (passed(mixed_precision="fp4"), {}, "mixed_precision='fp4'.*no, fp8, fp16, bf16"),
        (passed(), {"ACCELERATE_MIXED_PRECISION": "half"}, "ACCELERATE_MIXED_PRECISION='half'"),
        (passed(), {"MIXED_PRECISION": "half"}, "MIXED_PRECISION='half'"),
        (passed(gradient_accumulation_steps=0), {}, "gradient_accumulation_steps=0"),
        (passed(gradient_accumulation_steps=1.5), {}, "gradient_accumulation_steps=1.5"),
        (passed(), {STEPS: "two"}, f"{STEPS}='two'"),
        (passed(), {STEPS: "0"}, f"{STEPS}='0'"),
        (
            passed(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin()),
            {},
            "gradient_accumulation_steps=2.*one of them",
        ),
        (passed(rng_types=["dice"]), {}, "rng_types='dice'"),
        (passed(step_scheduler_with_optimizer="often"), {}, "step_scheduler_with_optimizer='often'"),
        (passed(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()]), {}, "AutocastKwargs.*twice"),
        (passed(kwargs_handlers=["ddp"]), {}, "not a KwargsHandler"),
        (passed(kwargs_handlers=AutocastKwargs()), {}, "kwargs_handlers='AutocastKwargs': it is not a list"),
        (passed(kwargs_handlers=3), {}, "kwargs_handlers=3: it is not a list"),
        (passed(cpu="false"), {}, "cpu='false': it is text"),
        (passed(kwargs_handlers=[AutocastKwargs(enabled="no")]), {}, "enabled='no': it is text"),
        (passed(dataloader_config=DataLoaderConfiguration(even_batches="no")), {}, "even_batches='no'"),
        (
            passed(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin()),
            {},
            "dynamo_backend='eager'.*one of them",
        ),
        (
            passed(split_batches=True, dataloader_config=DataLoaderConfiguration()),
            {},
            "split_batches=True.*dataloader_config only",
        ),
        (
            passed(project_dir="a", project_config=ProjectConfiguration(project_dir="b")),
            {},
            "project_dir='a'.*'b'",
        ),
        (passed(), {"ACCELERATE_USE_CPU": "maybe"}, "ACCELERATE_USE_CPU='maybe'"),
    ],
)
def test_wrong_arguments_raise_an_error_with_value_reason_and_fix(
    arguments: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(arguments, environ)


def test_each_handler_finds_its_field() -> None:
    ddp, autocast = DistributedDataParallelKwargs(static_graph=True), AutocastKwargs(cache_enabled=False)
    activations = ActivationCheckpointing(every=2)
    request = build(passed(kwargs_handlers=[autocast, ddp, activations]), {})
    assert request.activations is activations
    assert request.ddp is ddp
    assert request.autocast is autocast
    assert request.scaler is None


def test_changes_to_given_objects_are_seen() -> None:
    config = DataLoaderConfiguration()
    request = build(passed(dataloader_config=config), {})
    config.dispatch_batches = True
    assert request.dataloader_config.dispatch_batches


def test_other_arguments() -> None:
    request = build(
        passed(split_batches=True, rng_types=["torch"], project_dir="logs", dynamo_backend="inductor"),
        {"ACCELERATE_USE_CPU": "true"},
    )
    assert request.dataloader_config.split_batches
    assert request.rng_types == [RNGType.TORCH]
    assert request.project.logging_dir == "logs"
    assert request.dynamo.backend == DynamoBackend.INDUCTOR
    assert request.cpu


def test_one_rng_type_needs_no_list() -> None:
    assert build(passed(rng_types="torch"), {}).rng_types == [RNGType.TORCH]


@pytest.mark.parametrize(
    ("given", "environ", "named"),
    [
        ({"torch_tp_plugin": object()}, {}, "torch_tp_plugin"),
        ({}, {"ACCELERATE_USE_TP": "true"}, "ACCELERATE_USE_TP"),
    ],
)
def test_the_older_plugin_is_refused_and_not_ignored(
    given: dict[str, Any], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{named} requests tensor parallelism"):
        build(passed(**given), environ)
    assert build(passed(), {"ACCELERATE_USE_TP": "false"}).parallelism is None


def test_deepspeed_is_enabled_by_arguments_or_the_environment() -> None:
    assert build(passed(), {"ACCELERATE_USE_DEEPSPEED": "false"}).deepspeed is None
    launched = build(passed(), {"ACCELERATE_USE_DEEPSPEED": "1"})
    assert isinstance(launched.deepspeed, DeepSpeedPlugin)
    one, two = DeepSpeedPlugin(), DeepSpeedPlugin(zero_stage=3)
    assert build(passed(deepspeed_plugin=one), {}).deepspeed is one
    several = {"a": one, "b": two}
    assert build(passed(deepspeed_plugins=several), {}).deepspeed is several


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"deepspeed_plugin": 5}, "neither a DeepSpeedPlugin nor"),
        ({"deepspeed_plugin": {}}, "neither a DeepSpeedPlugin nor"),
        ({"deepspeed_plugin": {"a": 5}}, "neither a DeepSpeedPlugin nor"),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": DeepSpeedPlugin()},
            "both say how DeepSpeed trains",
        ),
    ],
)
def test_other_objects_are_refused_as_deepspeed_plugin(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        build(passed(**given), {})


def test_fsdp_and_mesh_are_enabled_by_arguments_or_the_environment() -> None:
    assert build(passed(), {"ACCELERATE_USE_FSDP": "false"}).fsdp is None
    launched = build(passed(), {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"})
    assert isinstance(launched.fsdp, FullyShardedDataParallelPlugin)
    assert isinstance(launched.parallelism, ParallelismConfig)
    plugin, mesh = FullyShardedDataParallelPlugin(fsdp_version=2), ParallelismConfig(dp_shard_size=2)
    given = build(passed(fsdp_plugin=plugin, parallelism_config=mesh), {})
    assert given.fsdp is plugin
    assert given.parallelism is mesh


@pytest.mark.parametrize("argument", ["fsdp_plugin", "parallelism_config", "dataloader_config"])
def test_an_object_of_another_kind_is_refused(argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}='dict': it is not a"):
        build(passed(**{argument: {}}), {})


@pytest.mark.parametrize("steps", [0, 1.5, "2"])
def test_a_count_of_steps_that_is_assigned_is_checked(steps: Any, states: None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match=f"gradient_accumulation_steps={steps!r}"):
        accelerator.gradient_accumulation_steps = steps
    assert accelerator.gradient_accumulation_steps == 2


def test_handlers_of_an_iterator_are_read_once() -> None:
    handler = AutocastKwargs(enabled=False)
    request = build(passed(kwargs_handlers=iter([handler])), {})
    assert request.autocast is handler
    assert request.handlers == (handler,)
