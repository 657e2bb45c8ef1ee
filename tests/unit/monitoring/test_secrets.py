"""Secrets are hidden by name and by format, and harmless values are not."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.monitoring import (
    Checkpoint,
    End,
    Event,
    RecordWriter,
    Values,
    hide_secrets,
    hide_secrets_of_command,
)
from accelerate.monitoring.secrets import hide_in_text
from accelerate.report import read_run, write_page
from accelerate.tracking import ReportTracker

SECRET = "xK9vQ2mPzL7w"
NAMES = [
    "password",
    "db_password",
    "dbPassword",
    "passwd",
    "pwd",
    "passphrase",
    "smtp_pass",
    "secret",
    "client-secret",
    "secrets",
    "secret_value",
    "credentials",
    "token",
    "hub_token",
    "hf_token",
    "hftoken",
    "hfToken",
    "HF_TOKEN",
    "accessToken",
    "use_auth_token",
    "access_tokens",
    "tokens",
    "api_key",
    "apikey",
    "API_KEY",
    "openai_key",
    "wandb_key",
    "WANDB_API_KEY",
    "private_key",
    "AWS_SECRET_ACCESS_KEY",
    "ssh-key",
    "auth",
    "Authorization",
    "model.hub.token",
    "trackers/wandb/api_key",
    "wandb.key",
    "openai/key",
    "access_key_id",
    "AWS_ACCESS_KEY_ID",
    "wandbapikey",
    "OPENAIAPIKEY",
    "secretaccesskey",
    "sshkey",
    "dbpass",
    "tokenhf",
    "token_hf",
    "TOKENS_HF",
    "jwt",
    "creds",
    "bearer",
    "github_pat",
    "session_id",
    "Cookie",
]
HARMLESS = [
    "max_tokens",
    "num_tokens",
    "tokens_per_second",
    "tokenizer",
    "tokenizer_name",
    "pad_token",
    "eos_token",
    "padToken",
    "special_tokens",
    "additional_special_tokens",
    "decoder_start_token",
    "token_type",
    "key",
    "key_dim",
    "label_key",
    "sort_keys",
    "keyboard",
    "monkey",
    "author",
    "authors",
    "password_file",
    "secretary",
    "compass",
    "bypass",
    "forward_pass",
    "passes",
    "num_passes",
    "key_value_cache",
    "num_key_value_heads",
    "turkey",
    "pat",
    "user_id",
]
TEXT_TOKENS = [
    *("tool_token", "think_token", "register_token", "system_token", "separator_token", "newline_token"),
    *("classifier_token", "distill_token", "assistant_token", "user_token", "user_tokens", "tokens"),
]
FORMATS = [
    "hf_" + "aB3dE6gH9j" * 3 + "abcd",
    "sk-" + "aB3dE6gH9j" * 4,
    "sk-proj-" + "aB3dE6gH9j" * 4,
    "sk-ant-api03-" + "aB3dE6gH9j" * 4,
    "ghp_" + "aB3dE6gH9j" * 3 + "abcdef",
    "github_pat_" + "aB3dE6gH9j" * 4,
    "glpat-" + "aB3dE6gH9j" * 2,
    "AKIA" + "ABCDEFGH23456789",
    "xoxb-123456789012-abcdefABCDEF",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\\n{SECRET}\\n",
]
LOGINS = [
    f"https://user:{SECRET}@host/path",
    f"postgres://admin:{SECRET}@db.example.com:5432/x",
    f"http://:{SECRET}@proxy:8080",
    f"user:{SECRET}@host",
    f"https://api.example.com/?token={SECRET}&n=1",
    f"Authorization: Bearer {SECRET}",
    f"Authorization: Basic {SECRET}",
    f"curl -H 'authorization: {SECRET}'",
    f"password={SECRET}",
    f"Namespace(lr=0.1, hub_token='{SECRET}', n=2)",
    f"Config(api_key=b'{SECRET}')",
    f"ValueError: {{'password': '{SECRET}'}} is wrong",
    f'{{"net": {{"hfToken": "{SECRET}"}}, "list": [{{"password": "{SECRET}"}}]}}',
    f'{{\\"token\\": \\"{SECRET}\\"}}',
    f"tokens=['{SECRET}', 'b{SECRET}']",
    f"credentials={{'a': {{'b': '{SECRET}'}}, 'c': ['{SECRET}']}} and more",
    f"password='{SECRET}",
    f"{{net: {{hub_token: {SECRET}}}}}",
    f"lr: 1\nhub_token: {SECRET}\n",
    f"https://user:a={SECRET}@host",
    f"https://{SECRET}@github.com/x",
    f"https://{SECRET}@o1.ingest.sentry.io/1",
    f"https://host/x?sig={SECRET}&n=1",
    f"https://host/x?n=1&X-Amz-Signature={SECRET}",
    f"Authorization: token {SECRET}",
    f"Cookie: id=1; session={SECRET}",
    f"train.py --token {SECRET}",
    f"python x.py --hub_token={SECRET} --lr 1",
    f"failed: x --hf_token {SECRET} --lr 1",
    f"--hf_token\n{SECRET}",
    f"Command '['x', '--token', '{SECRET}']' returned 1",
    f'["--token", "{SECRET}"]',
    f"-password={SECRET}",
    f"--password:{SECRET}",
    f"url?x&--token={SECRET}",
    f"curl -u me:{SECRET}",
    f"curl --user me:{SECRET}",
    f"sh -c 'x.py --hub_token={SECRET}'",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        SECRET.encode(),
        [SECRET, SECRET.encode()],
        (SECRET,),
        {"user": SECRET, "deep": [{"x": SECRET}]},
    ],
    ids=["text", "bytes", "list", "tuple", "dictionary"],
)
def test_values_of_secret_names_are_hidden(name: str, value: Any) -> None:
    for values in ({name: value}, {"outer": {name: value}}, {"outer": [{name: value}]}):
        assert SECRET not in str(hide_secrets(values))


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("value", ["gpt2", 512, ["<s>", "</s>"], None, True])
def test_values_of_harmless_names_are_shown(name: str, value: Any) -> None:
    values = {name: value, "nested": {name: [value]}}
    assert hide_secrets(values) == values
    words = ["train.py", f"--{name}", "gpt2", f"--{name}=gpt2", f"{name}=512"]
    assert hide_secrets_of_command(words) == words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", None),
        ("use_auth", True),
        ("password", ""),
        ("tokens", 1000),
        ("token", 0.5),
        ("auth", False),
    ],
)
def test_values_that_are_no_text_are_shown_unless_a_password_is_a_number(name: str, value: Any) -> None:
    assert hide_secrets({name: value}) == {name: value}
    assert hide_secrets({"password": 1234, "pwd": torch.tensor(1)}) == {"password": "***", "pwd": "***"}


@pytest.mark.parametrize("text", [*FORMATS, *LOGINS])
def test_secrets_in_texts_are_hidden(text: str) -> None:
    for shown in (hide_in_text(text), hide_in_text(f"start {text} end"), hide_in_text(f'a "{text}" b')):
        assert SECRET not in shown
        assert text not in shown
        assert "***" in shown
    assert "***" in str(hide_secrets({"note": [text]}))
    (script, option, shown) = hide_secrets_of_command(["train.py", "--note", text])
    assert (script, option) == ("train.py", "--note")
    assert SECRET not in shown
    assert text not in shown


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com/a:b@c",
        "ssh://git@github.com/a/b",
        "loss=0.5, max_tokens=512, lr: 1e-3",
        "meta-llama/Llama-3.1-8B",
        "task-specific-parameters-with-a-long-name-1",
        "s3://bucket/key=value/file",
        "image:tag@sha256:abc",
        'File "train.py", line 7, in <module>',
        "KeyError: 'token'",
        "unexpected token: x",
        "Basic understanding",
        "tokens=512 token=7",
        "hf_transformers and hf_hub_download",
        "2024-01-01 10:00:00",
        '{"lr": 0.1, "layers": [1, 2]}',
        "-----BEGIN CERTIFICATE-----",
        "train.py --lr 0.1 --max_tokens 512 --tokenizer gpt2",
        "use --hub_token or --push, as --token is missing",
        "argument --token: expected one argument",
        "x.py --hub_token --push --token 512",
        "Command '['x', '--lr', '1', '--hub_token', '--push']' returned 1",
        "https://user@host and git@github.com:org/x",
        "docker run -u 1000:1000 --user root image",
        "tool_token=<|tool|> user_token='<|user|>', sep [SEP]",
        "tokens=[1, 2, 3] tokens='7 8'",
        "https://host/x?design=a1b2c3",
        "",
    ],
)
def test_harmless_texts_are_shown(text: str) -> None:
    assert hide_in_text(text) == text


@pytest.mark.parametrize("option", ["--wrap", "--extra_args"])
def test_a_command_in_a_word_of_a_command_is_read_as_one(option: str) -> None:
    command = f"python x.py --lr 1 --hub_token={SECRET} --token {SECRET}"
    shown = "python x.py --lr 1 --hub_token=*** --token ***"
    assert hide_secrets_of_command([option, command]) == [option, shown]
    assert hide_secrets_of_command([f"{option}={command}"]) == [f"{option}={shown}"]
    assert hide_in_text(f"{option}='{command}'") == f"{option}='{shown}'"


def test_options_with_the_names_of_secrets_are_hidden() -> None:
    words = {
        f"--hub_token {SECRET} --push": "--hub_token *** --push",
        f"--hf_token -{SECRET} x.txt": "--hf_token *** x.txt",
        f"--token={SECRET}": "--token=***",
        f"--wandb-api-key {SECRET}": "--wandb-api-key ***",
        f"--accessToken {SECRET}": "--accessToken ***",
        f"HF_TOKEN={SECRET} +model.token={SECRET}": "HF_TOKEN=*** +model.token=***",
        f"--tokens {SECRET} b{SECRET} --n 2": "--tokens *** *** --n 2",
        "--hub_token --push --tokens 512": "--hub_token --push --tokens 512",
        "train.py --hub_token": "train.py --hub_token",
        f"--hub_token --{SECRET} x": "--hub_token *** x",
        f"--user me:{SECRET} -u me:{SECRET} --user me": "--user me:*** -u me:*** --user me",
        f"--extra=--hub_token={SECRET}": "--extra=--hub_token=***",
        "--tokenizer gpt2 -p 8080 --token= a": "--tokenizer gpt2 -p 8080 --token= a",
        f'--config={{"token":"{SECRET}=="}}': '--config={"token": "***"}',
        f'{{"token":"{SECRET}=="}}': '{"token": "***"}',
    }
    for line, shown in words.items():
        assert hide_secrets_of_command(line.split(" ")) == shown.replace('": "', '":_"').split(" ") or (
            " ".join(hide_secrets_of_command(line.split(" "))) == shown
        )


@pytest.mark.parametrize("name", TEXT_TOKENS)
def test_tokens_of_texts_are_shown_and_random_text_is_hidden(name: str) -> None:
    for value in ("<|user|>", "</s>", "[SEP]", "sep", "User", "\n", "1, 2, 3", "[1, 2]", "<|a|> <|b|>", 7):
        assert hide_secrets({name: value, "deep": [{name: value}]}) == {name: value, "deep": [{name: value}]}
        words = ["train.py", f"--{name}={value}", f"--{name}", str(value)]
        assert hide_secrets_of_command(words) == words
    for value in (SECRET, f"<{SECRET}>", f"sep {SECRET}", "s3cr3tvalue", "correct horse!"):
        assert hide_secrets({name: value}) == {name: "***"}
        assert hide_secrets_of_command([f"--{name}={value}"]) == [f"--{name}=***"]


@pytest.mark.parametrize("service", ["wandb", "openai", "api", "aws"])
def test_a_key_below_the_name_of_a_service_is_hidden(service: str) -> None:
    hidden = {service: {"key": "***", "lr": "x"}}
    assert hide_secrets({service: {"key": SECRET, "lr": "x"}}) == hidden
    assert hide_secrets({"deep": [{service: [{"key": SECRET}]}]}) == {"deep": [{service: [{"key": "***"}]}]}


def test_the_pass_of_a_user_is_hidden() -> None:
    assert hide_secrets({"user": "me", "pass": "hunter"}) == {"user": "me", "pass": "***"}
    assert hide_secrets({"epoch": "1", "pass": "first"}) == {"epoch": "1", "pass": "first"}


def test_a_list_of_the_words_of_a_command_is_read_as_one() -> None:
    words = ["x.py", "--lr", 1, "--token", SECRET, 2.5, "--user", f"me:{SECRET}", "-1", ["a"]]
    shown = ["x.py", "--lr", 1, "--token", "***", 2.5, "--user", "me:***", "-1", ["a"]]
    assert hide_secrets({"args": words, "deep": [{"x": tuple(words)}]}) == {
        "args": shown,
        "deep": [{"x": shown}],
    }


def test_long_texts_take_no_long_time() -> None:
    for text in (
        "--token " * 10**5,
        "-" * 10**5,
        "-u a:" * 10**5,
        "?sig=&" * 10**5,
        "hfhf" * 10**5 + "=1",
        "://" + "a1" * 10**5,
        "x" * 10**6,
        "a=" * 10**5,
        "{" * 10**5,
        "://" * 10**5,
        "'" * 10**5,
        "sk-" * 10**5,
        "a:" * 10**5,
    ):
        assert len(hide_in_text(text)) >= len(text) / 2


@pytest.mark.usefixtures("states")
def test_no_record_and_no_page_contains_a_planted_secret(tmp_path: Path) -> None:
    chance = random.Random(0)
    secrets = []
    tracker = ReportTracker("project", str(tmp_path))
    tracker.start()
    writer = RecordWriter(tmp_path / "run_records", 0)
    for _ in range(150):
        secret = "".join(chance.choices(string.ascii_letters + string.digits, k=16))
        secrets.append(secret)
        name = chance.choice(NAMES)
        value: Any = secret
        for _ in range(chance.randrange(3)):
            value = chance.choice([[value], {"x": value}, (1, value), {"y": [value, "z"]}])
        values = {"lr": 0.1, "net": {name: value}} if chance.random() < 0.5 else {name: value}
        tracker.store_init_configuration(values)
        tracker.log(values if chance.random() < 0.5 else {"note": json.dumps(values)}, step=1)
        text = f"failed with {name}={secret!r} in {json.dumps(values)} of {values!r}"
        writer.write(
            Event(time=1.0, name="warning", step=1, text=text),
            Checkpoint(time=1.0, event="failed", path="x", step=1, text=text),
            End(time=1.0, how="failed", error=text, digest=text),
            Values(time=1.0, step=1, values=values),
        )
    writer.close()
    tracker.finish()
    records = (tmp_path / "run_records" / "rank-00000.jsonl").read_text()
    page = write_page([read_run(tmp_path)])
    leaked = [secret for secret in secrets if secret in records or secret in page]
    assert leaked == []
