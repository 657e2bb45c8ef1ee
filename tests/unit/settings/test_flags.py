from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from accelerate.settings import CustomArgumentParser, all_options, clean_option, flags
from accelerate.settings.flags import add_sections

GOLDEN = Path(__file__).parents[2] / "api" / "golden" / "launch_flags.json"


@pytest.fixture(scope="module")
def parser() -> CustomArgumentParser:
    made = CustomArgumentParser(prog="accelerate launch", allow_abbrev=False)
    add_sections(made)
    return made


OWN = {"config_file", "quiet", "module", "no_python"}  # declared by the command, not by a section


@pytest.mark.parametrize("flag", json.loads(GOLDEN.read_text()), ids=lambda flag: flag["option_strings"][0])
def test_every_flag_of_the_interface_has_its_spellings_destination_and_default(
    parser: CustomArgumentParser, flag: dict[str, object]
) -> None:
    if flag["dest"] in OWN:
        return
    for spelling in flag["option_strings"]:  # type: ignore[attr-defined]
        action = parser._option_string_actions[spelling]
        assert action.dest == flag["dest"]
        assert type(action).__name__.strip("_") == flag["action"]
        default = list(action.default) if isinstance(action.default, tuple) else action.default
        assert default == flag["default"]
        assert set(flag["choices"] or ()) <= set(action.choices or ())  # type: ignore[call-overload]


def test_flags_are_sorted_into_the_groups_of_the_documentation(parser: CustomArgumentParser) -> None:
    groups = {group.title: {a.dest for a in group._group_actions} for group in parser._action_groups}
    assert "cpu" in groups["Hardware Selection Arguments"]
    assert "num_processes" in groups["Resource Selection Arguments"]
    assert "use_fsdp" in groups["Training Paradigm Arguments"]
    assert "fsdp_version" in groups["FSDP Arguments"]


def test_dashes_and_underscores_are_the_same_flag(parser: CustomArgumentParser) -> None:
    assert parser.parse_args(["--num-processes", "3"]).num_processes == 3
    assert parser.parse_args(["--num-processes=3"]).num_processes == 3
    assert parser.parse_args(["--num_processes", "3"]).num_processes == 3


def test_given_flags_are_distinguished_from_defaults(parser: CustomArgumentParser) -> None:
    words = ["--fsdp_version", "1", "--vm", "a", "--vm", "b", "--no_tpu_cluster"]
    namespace = parser.parse_args(words)
    flags.mark_given(parser, namespace, words)
    assert namespace.given == {"fsdp_version", "vm", "tpu_use_cluster"}
    assert dict(flags.layer(namespace).values) == {
        "fsdp_version": 1,
        "vm": ("a", "b"),
        "tpu_use_cluster": False,
    }


def test_a_namespace_without_a_parser_sets_values_that_differ_from_the_default() -> None:
    namespace = argparse.Namespace(num_processes=2, fsdp_version="1", mixed_precision=None, cpu=True)
    assert dict(flags.layer(namespace).values) == {"num_processes": 2, "cpu": True}


def test_wrong_values_of_flags_are_all_named() -> None:
    namespace = argparse.Namespace(fsdp_offload_params="perhaps", parallelism_config_sp_seq_length="long")
    with pytest.raises(ValueError, match="2 settings are wrong") as caught:
        flags.layer(namespace)
    assert "--fsdp_offload_params='perhaps': this must be yes or no" in str(caught.value)
    assert "--parallelism_config_sp_seq_length='long'" in str(caught.value)


def complaint(parser: CustomArgumentParser, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_all_wrong_flags_are_in_one_error(
    parser: CustomArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint(
        parser,
        "--megatron_lm_tp_degree two --megatron_lm_use_custom_fsdp maybe --mixed_precision fp7",
        capsys,
    )
    first, tp, fsdp, precision = message.splitlines()
    assert first == "accelerate launch: error: 3 flags are wrong:"
    assert tp.endswith("invalid int value: 'two'")
    assert fsdp.endswith("'maybe' must be true or false")
    assert "invalid choice: 'fp7'" in precision
    assert "--help" in precision
    one = complaint(parser, "--num_processes x", capsys)  # what was wrong before is forgotten
    assert one.count("\n") == 1
    assert parser.parse_args(["--num_processes", "2"]).num_processes == 2


def test_argparse_itself_parses(parser: CustomArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that read our parsers, for a completion or a list of flags, replace argparse's method."""
    seen: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, *args: seen.append(self))
    parser.parse_args([])
    assert seen == [parser]


def test_clean_option_removes_the_dashes() -> None:
    assert clean_option("--multi-gpu") == "multi_gpu"


@pytest.mark.parametrize("name", sorted(all_options()))
def test_every_option_has_help_of_one_sentence(name: str) -> None:
    text = all_options()[name].help
    assert text.endswith(".")
    assert text[0].isupper() or text[0].islower()
    assert "\n" not in text
