"""The plugin holds the arguments of Megatron-LM, from arguments and the environment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.plugins import MegatronLMPlugin, find_wrong_network, find_wrong_sizes
from accelerate.plugins.megatron import read_backend

SAMPLES = Path(__file__).parents[2] / "samples" / "launch_environments.json"

FROM_ENVIRONMENT = {
    "TP_DEGREE": ("2", "tp_degree", 2),
    "PP_DEGREE": ("4", "pp_degree", 4),
    "USE_CUSTOM_FSDP": ("true", "use_custom_fsdp", True),
    "NO_LOAD_OPTIM": ("true", "no_load_optim", True),
    "EOD_MASK_LOSS": ("1", "eod_mask_loss", True),
    "NO_SAVE_OPTIM": ("yes", "no_save_optim", True),
    "OPTIMIZER_CPU_OFFLOAD": ("true", "optimizer_cpu_offload", True),
    "OVERLAP_CPU_OPTIMIZER_D2H_H2D": ("true", "overlap_cpu_optimizer_d2h_h2d", True),
    "USE_PRECISION_AWARE_OPTIMIZER": ("true", "use_precision_aware_optimizer", True),
    "DECODER_LAST_PIPELINE_NUM_LAYERS": ("3", "decoder_last_pipeline_num_layers", 3),
    "NUM_MICRO_BATCHES": ("8", "num_micro_batches", 8),
    "SEQUENCE_PARALLELISM": ("true", "sequence_parallelism", True),
    "RECOMPUTE_ACTIVATIONS": ("true", "recompute_activations", True),
    "USE_DISTRIBUTED_OPTIMIZER": ("true", "use_distributed_optimizer", True),
    "GRADIENT_CLIPPING": ("0.5", "gradient_clipping", 0.5),
    "RECOMPUTE_GRANULARITY": ("full", "recompute_granularity", "full"),
    "RECOMPUTE_METHOD": ("block", "recompute_method", "block"),
    "RECOMPUTE_NUM_LAYERS": ("2", "recompute_num_layers", 2),
    "ATTENTION_BACKEND": ("flash", "attention_backend", "flash"),
    "EXPERT_MODEL_PARALLEL_SIZE": ("2", "expert_model_parallel_size", 2),
    "CONTEXT_PARALLEL_SIZE": ("2", "context_parallel_size", 2),
    "ATTENTION_DROPOUT": ("0.1", "attention_dropout", 0.1),
    "HIDDEN_DROPOUT": ("0.2", "hidden_dropout", 0.2),
    "ATTENTION_SOFTMAX_IN_FP32": ("false", "attention_softmax_in_fp32", False),
    "EXPERT_TENSOR_PARALLEL_SIZE": ("2", "expert_tensor_parallel_size", 2),
    "CALCULATE_PER_TOKEN_LOSS": ("false", "calculate_per_token_loss", False),
    "USE_ROTARY_POSITION_EMBEDDINGS": ("true", "use_rotary_position_embeddings", True),
}
"""Variable -> its text, the field, the value."""


def test_defaults_leave_recomputation_and_kernels_to_megatron() -> None:
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (1, 1, 1)
    assert plugin.context_parallel_size == 1  # one process can train
    arguments = plugin.megatron_lm_default_args
    assert arguments["tensor_model_parallel_size"] == 1
    assert arguments["clip_grad"] == 1.0
    assert not {"recompute_granularity", "attention_backend"} & set(arguments)


def test_every_field_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _, _) in FROM_ENVIRONMENT.items():
        monkeypatch.setenv(f"MEGATRON_LM_{name}", text)
    plugin = MegatronLMPlugin()
    assert {field: getattr(plugin, field) for _, field, _ in FROM_ENVIRONMENT.values()} == {
        field: value for _, field, value in FROM_ENVIRONMENT.values()
    }


def test_the_table_above_has_all_variables() -> None:
    launched = json.loads(SAMPLES.read_text())
    written = {name for name in json.dumps(launched).split('"') if name.startswith("MEGATRON_LM_")}
    assert written <= {f"MEGATRON_LM_{name}" for name in FROM_ENVIRONMENT}
    assert written


def test_all_wrong_variables_and_fields_are_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "two")
    monkeypatch.setenv("MEGATRON_LM_NO_LOAD_OPTIM", "perhaps")
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "0")
    with pytest.raises(ConfigurationError, match="4 settings are wrong") as caught:
        MegatronLMPlugin(lr_decay_style="upwards")
    for wrong in ("TP_DEGREE='two'", "NO_LOAD_OPTIM='perhaps'", "pp_degree=0", "lr_decay_style='upwards'"):
        assert wrong in str(caught.value)


def test_a_wsd_schedule_needs_its_number_of_decay_steps() -> None:
    with pytest.raises(ConfigurationError, match="lr_wsd_decay_iters"):
        MegatronLMPlugin(lr_decay_style="WSD")
    given = {"lr_wsd_decay_iters": 10}
    plugin = MegatronLMPlugin(lr_decay_style="WSD", other_megatron_args=given)
    assert given.items() <= plugin.megatron_lm_default_args.items()


def test_an_optimizer_on_the_cpu_is_precision_aware() -> None:
    with pytest.raises(ConfigurationError, match="optimizer_cpu_offload=True: only the precision-aware"):
        MegatronLMPlugin(optimizer_cpu_offload=True)


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "8")
    monkeypatch.setenv("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "true")
    plugin = MegatronLMPlugin(tp_degree=2, use_distributed_optimizer=False)
    assert plugin.tp_degree == 2
    assert plugin.use_distributed_optimizer is False


def test_arguments_of_megatron() -> None:
    plugin = MegatronLMPlugin(
        tp_degree=2,
        sequence_parallelism=True,
        recompute_activations=True,
        attention_backend=True,
        tensorboard_dir="logs",
        set_all_logging_options=True,
        other_megatron_args={"seed": 7, "timing_log_level": 2},
    )
    arguments = plugin.megatron_lm_default_args
    assert arguments["sequence_parallel"] is True
    assert arguments["recompute_granularity"] == "selective"
    assert arguments["attention_backend"] == "auto"
    assert arguments["tensorboard_dir"] == "logs"
    assert arguments["log_params_norm"] is True
    assert (arguments["seed"], arguments["timing_log_level"]) == (7, 2)


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        MegatronLMPlugin(
            tp_degree=0,
            hidden_dropout=2.0,
            recompute_method="uniform",
            lr_decay_style="steep",
            train_iters=10,
            train_samples=100,
            use_precision_aware_optimizer=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            num_layers_per_virtual_pipeline_stage=2,
            weight_decay_incr_style="linear",
            pipeline_model_parallel_split_rank=1,
            attention_backend="fast",
            gradient_clipping=-1.0,
            custom_train_step_class="Step",
        )
    message = str(caught.value)
    assert message.startswith("13 settings are wrong:")
    for text in (
        "tp_degree=0",
        "hidden_dropout=2.0",
        "recompute_granularity='full'",
        "lr_decay_style='steep'",
        "train_iters=10 and train_samples=100",
        "use_distributed_optimizer=True",
        "optimizer_cpu_offload=True",
        "pp_degree to 2",
        "start_weight_decay",
        "pipeline_model_parallel_split_rank=1",
        "flash, fused",
        "gradient_clipping=-1.0",
        "custom_train_step_class",
    ):
        assert text in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no", {}),
        ("fp16", {"fp16": True}),
        ("bf16", {"bf16": True}),
        ("fp8", {"bf16": True, "fp8": "hybrid"}),
    ],
)
def test_the_number_format_sets_the_flags_of_megatron(name: str, expected: dict[str, Any]) -> None:
    plugin = MegatronLMPlugin()
    plugin.set_mixed_precision(name)
    found = {key: plugin.megatron_lm_default_args.get(key) for key in ("fp16", "bf16", "fp8")}
    assert {key: value for key, value in found.items() if value is not None} == expected


def test_sizes_of_batches() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=3)
    plugin.set_training_args(4, 2)
    assert (plugin.micro_batch_size, plugin.data_parallel_size, plugin.global_batch_size) == (4, 2, 24)
    assert plugin.megatron_lm_default_args["global_batch_size"] == 24


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]


def test_arguments_of_adam_are_read_from_the_optimizer() -> None:
    one, two = parameters()
    groups = [{"params": [one], "weight_decay": 0.3}, {"params": [two], "weight_decay": 0.0}]
    plugin = MegatronLMPlugin()
    plugin.set_optimizer_type(torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-5))
    found = plugin.megatron_lm_default_args
    assert found["optimizer"] == "adam"
    assert (found["adam_beta1"], found["adam_beta2"], found["adam_eps"]) == (0.8, 0.9, 1e-5)
    assert (found["lr"], found["weight_decay"]) == (0.1, 0.3)


def test_arguments_of_sgd_are_read_from_the_optimizer() -> None:
    plugin = MegatronLMPlugin()
    plugin.set_optimizer_type(torch.optim.SGD(parameters(), lr=0.1, momentum=0.7))
    found = plugin.megatron_lm_default_args
    assert (found["optimizer"], found["sgd_momentum"], found["weight_decay"]) == ("sgd", 0.7, 0)


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Adagrad.*AdamW, Adam or SGD"):
        MegatronLMPlugin().set_optimizer_type(torch.optim.Adagrad(parameters()))


def schedule(total: int | None = 100, warmup: int = 10) -> Any:
    return SimpleNamespace(total_num_steps=total, warmup_num_steps=warmup)


def test_length_of_training_from_the_scheduler() -> None:
    plugin = MegatronLMPlugin()
    plugin.set_training_args(4, 2)
    plugin.set_scheduler_args(schedule())
    found = plugin.megatron_lm_default_args
    assert (found["train_iters"], found["lr_warmup_iters"], found["lr_decay_style"]) == (50, 5, "linear")
    assert found["train_samples"] is None


def test_length_of_training_from_the_plugin() -> None:
    plugin = MegatronLMPlugin(train_iters=70, lr_warmup_fraction=0.1)
    plugin.set_training_args(4, 2)
    plugin.set_scheduler_args(schedule())
    found = plugin.megatron_lm_default_args
    assert (found["train_iters"], found["lr_warmup_iters"], found["lr_warmup_fraction"]) == (70, 0, 0.1)


def test_samples_instead_of_steps() -> None:
    plugin = MegatronLMPlugin(train_samples=800, lr_warmup_samples=80)
    plugin.set_schedule_args()
    found = plugin.megatron_lm_default_args
    assert (found["train_samples"], found["lr_warmup_samples"], found["train_iters"]) == (800, 80, None)


@pytest.mark.parametrize(
    ("given", "name"),
    [(True, "auto"), ("true", "auto"), (False, None), (None, None), ("FLASH", "flash"), ("flash", "flash")],
)
def test_the_attention_backend_is_read_from_text_and_booleans(given: Any, name: str | None) -> None:
    assert read_backend(given) == name


def test_processes_are_a_multiple_of_the_model_parallel_size() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2)
    assert find_wrong_sizes(plugin, 8) == []
    (problem,) = find_wrong_sizes(plugin, 6)
    assert "6 processes" in problem
    assert "tp_degree=2 * pp_degree=2 * context_parallel_size=1 = 4" in problem


def test_processes_are_a_multiple_of_the_expert_parallel_size() -> None:
    plugin = MegatronLMPlugin(expert_model_parallel_size=4)
    assert find_wrong_sizes(plugin, 4) == []
    (problem,) = find_wrong_sizes(plugin, 2)
    assert "expert_model_parallel_size=4" in problem


NETWORK = {"num_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "network", "problem"),
    [
        ({"pp_degree": 4}, {}, "6 layers cannot be divided between pp_degree=4"),
        ({"pp_degree": 3, "decoder_last_pipeline_num_layers": 1}, {}, "of which the last has 1"),
        ({"pp_degree": 2}, {"model_type_name": "t5"}, "no pipelines for T5"),
        (
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 2, "num_micro_batches": 2},
            {},
            "divisor of 3",
        ),
        (
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 3},
            {},
            "multiple of pp_degree=2",
        ),
        (
            {
                "pp_degree": 3,
                "num_layers_per_virtual_pipeline_stage": 1,
                "decoder_last_pipeline_num_layers": 2,
                "num_micro_batches": 3,
            },
            {},
            "decoder_last_pipeline_num_layers=2: the stages of an interleaved schedule",
        ),
        ({"tp_degree": 2}, {"num_experts": 4}, "sequence_parallelism=True, or tp_degree=1"),
        ({"tp_degree": 3}, {}, "8 attention heads"),
        ({"tp_degree": 4}, {"num_query_groups": 6}, "6 groups of queries"),
        ({"expert_model_parallel_size": 4}, {"num_experts": 6}, "6 experts"),
        ({"expert_model_parallel_size": 4}, {}, "no experts"),
        ({}, {"seq_length": 65}, "64 positions"),
        ({"tp_degree": 2, "sequence_parallelism": True}, {"seq_length": 33}, "multiple of 2"),
        ({"context_parallel_size": 2}, {"seq_length": 34}, "multiple of 4"),
    ],
)
def test_networks_that_do_not_fit(fields: dict[str, Any], network: dict[str, Any], problem: str) -> None:
    problems = find_wrong_network(MegatronLMPlugin(**fields), {**NETWORK, **network})
    assert len(problems) == 1
    assert problem in problems[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pp_degree": 3, "tp_degree": 4},
        {"pp_degree": 2, "decoder_last_pipeline_num_layers": 2},
        {"pp_degree": 3, "num_layers_per_virtual_pipeline_stage": 2, "num_micro_batches": 6},
        {"context_parallel_size": 2},
    ],
)
def test_networks_that_fit(fields: dict[str, Any]) -> None:
    assert find_wrong_network(MegatronLMPlugin(**fields), {**NETWORK, "seq_length": 32}) == []
