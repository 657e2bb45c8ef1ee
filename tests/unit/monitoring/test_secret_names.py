"""Words of names decide whether their values are secret, and values whether they are special tokens."""

from __future__ import annotations

import pytest

from accelerate.monitoring.secret_names import Strength, is_special, looks_random, strength_of


@pytest.mark.parametrize(
    ("name", "strength"),
    [
        ("hub_token", Strength.TEXT),
        ("hubToken", Strength.TEXT),
        ("HUBTOKEN", Strength.TEXT),
        ("token_hub_2", Strength.TEXT),
        ("secret_access_key_base64", Strength.TEXT),
        ("api/key", Strength.TEXT),
        ("a.api.key.b", Strength.TEXT),
        ("db_password", Strength.ALWAYS),
        ("dbpass", Strength.ALWAYS),
        ("user/pass", Strength.ALWAYS),
        ("tool_token", Strength.UNLESS_SPECIAL),
        ("tokens", Strength.UNLESS_SPECIAL),
        ("pad_token", Strength.NONE),
        ("monkey", Strength.NONE),
        ("keyboard", Strength.NONE),
        ("public_key", Strength.NONE),
        ("key_id", Strength.NONE),
        ("", Strength.NONE),
        (7, Strength.NONE),
    ],
)
def test_the_last_words_of_a_name_decide(name: object, strength: Strength) -> None:
    assert strength_of(name) is strength


@pytest.mark.parametrize(
    "text", ["<|user|>", "</s>", "[SEP]", "Sep", "sep2", "\n", "7", "['<a>', '[B]']", "(1, 2)"]
)
def test_special_tokens_are_recognized(text: str) -> None:
    assert is_special(text)


@pytest.mark.parametrize(
    "text", ["s3cr3tvalue", "<s3cr3tvalue>", "[s3cr3tvalue]", "aLongerPlainWord", "a-b", "x!y"]
)
def test_other_texts_are_no_special_tokens(text: str) -> None:
    assert not is_special(text)


@pytest.mark.parametrize("text", ["s3cr3tvalue", "xK9vQ2mPzL7w", "aBcDeFgH", "--0f1e2d3c4b5a6978", "a" * 32])
def test_generated_texts_look_random(text: str) -> None:
    assert looks_random(text)


@pytest.mark.parametrize(
    "text",
    ["--hub_token", "--adam_beta1", "--load_in_4bit", "Llama-3.1-8B", "startOfUserTurn", "git", "fp8e4m3"],
)
def test_names_do_not_look_random(text: str) -> None:
    assert not looks_random(text)
