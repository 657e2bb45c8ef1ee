from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate.base import ConfigurationError
from accelerate.commands.to_fsdp2 import load_config, main
from accelerate.settings import (
    ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING,
    ConversionStatus,
    config_file,
    convert_config_to_fsdp2,
    merge_layers,
)
from accelerate.settings.sections import FsdpSection

SAMPLES = Path(__file__).parents[2] / "samples" / "configs"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelerate-to-fsdp2", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_real_file_is_converted_and_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new.yaml"
    source = SAMPLES / "fsdp1.yaml"
    assert run(monkeypatch, "--config_file", str(source), "--output_file", str(target)) == 0
    new, old = yaml.safe_load(target.read_text()), yaml.safe_load(source.read_text())
    assert new["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    assert {**new, "fsdp_config": 0} == {**old, "fsdp_config": 0}
    out = capsys.readouterr().out
    assert "fsdp_backward_prefetch is left out: FSDP 2 needs no such setting" in out
    assert "fsdp_forward_prefetch is left out: it cannot be set for FSDP 2 yet" in out
    settings = merge_layers(config_file.read_layer(target, "file"))
    assert (settings.values["use_fsdp"], settings[FsdpSection].fsdp_version) == (True, 2)


def test_the_file_itself_is_replaced_only_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2}}))
    assert run(monkeypatch, "--config_file", str(path)) == 2
    assert run(monkeypatch, "--config_file", str(path), "--overwrite") == 0
    assert load_config(str(path))["fsdp_config"] == {"fsdp_version": 2, "fsdp_reshard_after_forward": False}


@pytest.mark.parametrize(("strategy", "kept"), ARGUMENT_VALUE_MAPPING["fsdp_sharding_strategy"].items())
def test_sharding_strategies_become_reshard_after_forward(strategy: str, kept: bool) -> None:
    for key in ARGUMENT_VALUE_MAPPING:
        new = convert_config_to_fsdp2({"fsdp_config": {key: strategy}})
        assert new["fsdp_config"]["fsdp_reshard_after_forward"] is kept


def test_every_key_of_the_section_has_a_conversion() -> None:
    assert set(ARGUMENT_KEY_MAPPING) == {row.key for row in FsdpSection.options()}
    assert {value for value in ARGUMENT_KEY_MAPPING.values() if isinstance(value, ConversionStatus)} == set(
        ConversionStatus
    )


def test_a_file_for_fsdp_2_is_unchanged() -> None:
    config = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}
    assert convert_config_to_fsdp2(config) == config


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"num_processes": 2}, "it is not for FSDP"),
        ({"fsdp_config": {}}, "it is not for FSDP"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SOME"}}, "there is no such strategy. Use one of FULL"),
        (
            {"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_reshard_after_forward": "true"}},
            "another setting gives",
        ),
    ],
)
def test_settings_that_cannot_be_converted_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        convert_config_to_fsdp2(config)


def test_unknown_keys_are_kept_with_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "old.json", tmp_path / "new.json"
    settings = {"fsdp_what": 1, "fsdp_offload_params": True, "fsdp_backward_prefetch_policy": "NO_PREFETCH"}
    source.write_text(json.dumps({"fsdp_config": settings}))
    assert run(monkeypatch, "--config_file", str(source), "--output_file", str(target)) == 0
    assert load_config(str(target))["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_what": 1,
        "fsdp_offload_params": True,
    }
    out = capsys.readouterr().out
    assert "fsdp_what stays as it is: no such setting is known" in out
    assert "fsdp_backward_prefetch is left out" in out


def test_bad_input_is_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken.yaml"
    taken.write_text("a: 1")
    source = str(SAMPLES / "fsdp1.yaml")
    for words, problem in (
        (("--config_file", "nowhere.yaml", "--overwrite"), "there is no such file"),
        (("--config_file", source, "--output_file", str(taken)), "there is a file already"),
        (("--config_file", str(SAMPLES / "zero3.yaml"), "--output_file", "x.yaml"), "it is not for FSDP"),
        ((), "required: --config_file"),
    ):
        assert run(monkeypatch, *words) == 2
        assert problem in capsys.readouterr().err
    assert taken.read_text() == "a: 1"
