"""What is suggested for words that nobody knows."""

from __future__ import annotations

import pytest

from accelerate.settings import nearest, unknown_command, unknown_flag, wrong_choice

PRECISIONS = ("no", "fp16", "bf16", "fp8")
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
FLAGS = ("--config_file", "--cpu", "--resume")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("bfloat16", PRECISIONS, "bf16"),
        ("float16", PRECISIONS, "fp16"),
        ("BF16", PRECISIONS, "bf16"),
        ("fp32", PRECISIONS, "no"),
        ("bf16", DTYPES, "bfloat16"),
        ("fp16", DTYPES, "float16"),
        ("floot32", DTYPES, "float32"),
        ("8bit", DTYPES, "int8"),
        ("--cfg", FLAGS, "--config_file"),
        ("--confg_file", FLAGS, "--config_file"),
        ("--np", ("--tpu", "--num_processes"), None),
        ("moon", DTYPES, None),
        ("--zz", FLAGS, None),
    ],
)
def test_the_nearest_word(word: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(word, known) == meant


def test_commands() -> None:
    assert (
        unknown_command("lauch", ["launch", "env"]) == "there is no command 'lauch'. Did you mean 'launch'?"
    )
    assert unknown_command("x", ["launch", "env"]) == "there is no command 'x'. There are: launch, env."


def test_values() -> None:
    assert wrong_choice("bad", "bfloat16", PRECISIONS) == "bad. Did you mean 'bf16'?"
    assert wrong_choice("bad", 3, (1, 2)) == "bad"


def test_flags() -> None:
    told = "unrecognized arguments: x --cfg=y"
    assert unknown_flag(told, FLAGS, "run") == " (did you mean --config_file? See run --help)"
    assert unknown_flag("unrecognized arguments: x", FLAGS, "run") == " (see run --help)"
