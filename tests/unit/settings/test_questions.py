from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.settings import SECTIONS, Questionnaire, all_options, as_mapping
from accelerate.settings.questions import ADVANCED, Check, LinePrompt


class Script:
    """Answers by a part of the question, and records the questions."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.by_text = {row.ask: name for name, row in all_options().items() if row.ask}

    def _answer(self, text: str, default: Any) -> Any:
        name = self.by_text.get(text, "advanced")
        self.asked.append(name)
        return self.answers.get(name, default)

    def say(self, text: str) -> None:
        raise AssertionError("the questionnaire only asks")

    def choose(self, text: str, offers: Sequence[str], default: str) -> str:
        chosen = str(self._answer(text, default))
        assert chosen in offers, text
        return chosen

    def confirm(self, text: str, default: bool) -> bool:
        return bool(self._answer(text, default))

    def write(self, text: str, default: str, check: Check) -> str:
        answer = str(self._answer(text, default))
        check(answer)
        return answer


def walk(suggested: dict[str, Any] | None = None, **answers: Any) -> tuple[list[str], dict[str, Any]]:
    script = Script(**answers)
    usual = {"distributed_type": "NO", "num_processes": 2, "main_process_port": 29500, **(suggested or {})}
    found = Questionnaire(script, SECTIONS, usual, left_out=("compute_environment",)).run()  # type: ignore[arg-type]
    return script.asked, found


def test_one_process_needs_few_questions() -> None:
    asked, found = walk()
    assert asked == ["distributed_type", "cpu", "mixed_precision", "advanced"]
    assert found == {"distributed_type": "NO", "cpu": False, "mixed_precision": "no"}


@pytest.mark.parametrize(
    ("answers", "asked", "not_asked"),
    [
        (
            {"distributed_type": "MULTI_GPU"},
            {"num_processes", "num_machines", "gpu_ids"},
            {"cpu", "main_process_ip", "fsdp_version", "zero_stage", "mpirun_hostfile"},
        ),
        (
            {"distributed_type": "MULTI_GPU", "num_machines": 2, "main_process_ip": "10.0.0.1"},
            {"machine_rank", "main_process_ip", "main_process_port"},
            {"mpirun_hostfile", "deepspeed_hostfile"},
        ),
        (
            {"distributed_type": "MULTI_CPU", "num_machines": 2, "main_process_ip": "10.0.0.1"},
            {"mpirun_hostfile"},
            {"gpu_ids"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_version": 2},
            {"fsdp_reshard_after_forward", "fsdp_auto_wrap_policy"},
            {"fsdp_sharding_strategy", "fsdp_use_orig_params", "zero_stage", "tpu_use_cluster"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_version": 1},
            {"fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_backward_prefetch"},
            {"fsdp_reshard_after_forward"},
        ),
        (
            {"distributed_type": "DEEPSPEED", "zero_stage": 3, "offload_param_device": "nvme"},
            {"offload_param_nvme_path", "zero3_init_flag"},
            {"offload_optimizer_nvme_path", "deepspeed_hostfile", "fsdp_version"},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config_file": "ds.json"},
            {"deepspeed_config_file"},
            {"zero_stage", "offload_param_device", "gradient_clipping"},
        ),
        (
            {"distributed_type": "MEGATRON_LM", "megatron_lm_tp_degree": 2},
            {"megatron_lm_sequence_parallelism", "megatron_lm_pp_degree"},
            {"megatron_lm_num_micro_batches", "gpu_ids"},
        ),
        (
            {"distributed_type": "XLA", "tpu_use_cluster": True, "mixed_precision": "bf16"},
            {"tpu_name", "tpu_zone", "downcast_bf16", "main_training_function"},
            {"num_machines", "gpu_ids"},
        ),
        ({"mixed_precision": "fp8", "fp8_backend": "te"}, {"fp8_format"}, {"fp8_pad_inner_dim"}),
        ({"mixed_precision": "fp8", "fp8_backend": "ao"}, {"fp8_pad_inner_dim"}, {"fp8_margin"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_only_what_applies_is_asked(answers: dict[str, Any], asked: set[str], not_asked: set[str]) -> None:
    names, _ = walk(**{"advanced": True, **answers}) if "main_training_function" in asked else walk(**answers)
    assert asked <= set(names)
    assert not not_asked & set(names)
    assert len(names) == len(set(names))


def test_advanced_questions_are_asked_on_request() -> None:
    usual, _ = walk(distributed_type="FSDP")
    all_of_them, found = walk(
        distributed_type="FSDP",
        advanced=True,
        dynamo_backend="inductor",
        use_parallelism_config=True,
        parallelism_config_cp_size=2,
    )
    more = set(all_of_them) - set(usual)
    assert {"debug", "dynamo_backend", "dynamo_mode", "parallelism_config_cp_comm_strategy"} <= more
    assert as_mapping(found)["dynamo_config"]["dynamo_backend"] == "inductor"
    assert as_mapping(found)["parallelism_config"]["parallelism_config_cp_size"] == 2


def test_suggestions_are_the_defaults() -> None:
    _, found = walk({"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"})
    assert (found["distributed_type"], found["num_processes"], found["mixed_precision"]) == (
        "MULTI_GPU",
        8,
        "bf16",
    )


@pytest.mark.parametrize("name", ["num_processes", "main_process_ip"])
def test_required_answers_cannot_be_empty(name: str) -> None:
    with pytest.raises(ConfigurationError, match="this needs an answer"):
        walk({"num_processes": None}, distributed_type="MULTI_GPU", num_machines=2, **{name: ""})


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"num_processes": 0}, "num_processes=0: there is at least one"),
        ({"num_machines": -1}, "num_machines=-1: there is at least one"),
        ({"num_machines": 2, "machine_rank": 2}, "machine_rank=2: ranks of machines go from 0 to 1"),
        (
            {"num_machines": 2, "main_process_ip": "a", "main_process_port": 70000},
            "this number is out of range",
        ),
    ],
)
def test_contradicting_answers_are_refused(answers: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        walk(distributed_type="MULTI_GPU", **answers)


def test_lists_are_written_with_commas_and_saved_as_lists() -> None:
    _, found = walk(distributed_type="XLA", tpu_use_cluster=True, vm="a, b", env="X=1")
    mapping = as_mapping(found)
    assert (mapping["tpu_vm"], mapping["tpu_env"]) == (["a", "b"], ["X=1"])
    assert "command_file" not in mapping


def test_every_question_has_a_condition_that_can_be_met() -> None:
    """No question has a condition that cannot be met."""
    answers: list[dict[str, Any]] = [
        {"mixed_precision": "fp8", "fp8_backend": backend} for backend in ("te", "ao", "msamp")
    ]
    machines = {"num_machines": 2, "main_process_ip": "a"}
    answers += [{"distributed_type": kind, **machines} for kind in ("MULTI_GPU", "MULTI_CPU")]
    answers += [
        {"distributed_type": "FSDP", "fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"distributed_type": "FSDP", "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
         "use_parallelism_config": True, "parallelism_config_cp_size": 2},
        {"distributed_type": "DEEPSPEED", "zero_stage": 3, "offload_param_device": "nvme",
         "offload_optimizer_device": "nvme", **machines, "deepspeed_multinode_launcher": "pdsh"},
        {"distributed_type": "MEGATRON_LM", "megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2},
        {"distributed_type": "XLA", "tpu_use_cluster": True, "mixed_precision": "bf16"},
        {"compute_environment": "AMAZON_SAGEMAKER"},
    ]  # fmt: skip
    seen: set[str] = {"compute_environment"}
    for each in answers:
        suggested = {"compute_environment": each.pop("compute_environment", "LOCAL_MACHINE"),
                     "ec2_instance_type": "ml.p3.2xlarge", "iam_role_name": "role"}  # fmt: skip
        seen |= set(walk(suggested, advanced=True, dynamo_backend="inductor", **each)[0])
    assert {name for name, row in all_options().items() if row.ask} - seen == set()


def lines(text: str) -> LinePrompt:
    return LinePrompt(io.StringIO(text), io.StringIO())


def test_questions_are_answered_by_lines() -> None:
    target = io.StringIO()
    prompt = LinePrompt(io.StringIO("B\n\ny\n no \n7\n\n"), target)
    assert prompt.choose("Which?", ("a", "b"), "a") == "b"
    assert prompt.choose("Which?", ("a", "b"), "a") == "a"
    assert prompt.confirm("Sure?", False) is True
    assert prompt.confirm("Sure?", True) is False
    assert prompt.write("How many?", "", int) == "7"
    assert prompt.write("How many?", "8", int) == "8"
    assert "Which? [a/b] (a): \n" in target.getvalue()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("c\n", "Which. 'c' is not among the answers. Answer with one of a, b."),
        ("", "The input ended before the question 'Which.*' was answered"),
    ],
)
def test_an_invalid_line_of_a_file_raises_an_error(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        lines(text).choose("Which?", ("a", "b"), "a")
    with pytest.raises(ConfigurationError, match="neither yes nor no"):
        lines("perhaps\n").confirm("Sure?", False)


def test_no_question_of_advanced_settings_without_such_settings() -> None:
    script = Script()
    section = next(section for section in SECTIONS if section.__name__ == "PrecisionSection")
    Questionnaire(script, (section,)).run()  # type: ignore[arg-type]
    assert script.asked == ["mixed_precision"]
    assert ADVANCED not in script.asked
