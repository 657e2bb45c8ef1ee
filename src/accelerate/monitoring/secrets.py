"""Passwords, tokens and private keys are replaced in what a run records, by their names and by their formats.

The folder of a project is often uploaded as a whole. Names are split into words: `hub_token` is `hubToken` or
`HUB-TOKEN`, and `max_tokens` or `pad_token` are not secret.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"
"""Written in place of a secret."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ENDINGS = frozenset({"value", "text", "string", "str", "json", "base64", "b64", "bytes", "raw"})
_STRONG = re.compile(
    r"(\w*(password|passwd|passphrase|pwd)|secret|credential|authorization|apikey|privatekey|secretkey)s?"
)
"""Words that are secret as the last one of a name, whole numbers included."""
_WEAK = re.compile(r"auth|(hf|hub|api|access|auth|bearer|refresh|session|github|gitlab|wandb)(token|key)s?")
_SERVICES = frozenset(
    {"anthropic", "aws", "azure", "clearml", "cohere", "comet", "gcp", "gemini", "github", "gitlab", "google"}
    | {"groq", "hf", "hub", "huggingface", "mistral", "neptune", "openai", "pinecone", "replicate", "slack"}
    | {"swanlab", "together", "wandb"}
)
_OF_KEYS = _SERVICES | {
    *(
        "access",
        "account",
        "api",
        "auth",
        "client",
        "deploy",
        "encryption",
        "gpg",
        "hmac",
        "license",
        "master",
    ),
    *("pgp", "private", "rsa", "secret", "service", "signing", "ssh", "subscription"),
}
"""Words before "key" that make it secret: others are keys of dictionaries, of sorting, of attention."""
_OF_TOKENS = _SERVICES | {"access", "api", "auth", "bearer", "bot", "refresh", "secret", "session", "user"}
"""Words before "tokens" that make them secret: other names in the plural are counts and text."""
_TEXT_TOKENS = frozenset(
    {
        "additional",
        "audio",
        "begin",
        "bos",
        "boi",
        "class",
        "cls",
        "end",
        "eoi",
        "eos",
        "eot",
        "first",
        "image",
    }
    | {"img", "last", "mask", "max", "next", "new", "num", "pad", "per", "prefix", "prompt", "replacement"}
    | {"sep", "special", "start", "stop", "suffix", "unexpected", "unk", "unknown", "video", "word"}
)
"""Words before "token" that make it one of a text."""
_OF_PASS = frozenset({"admin", "db", "database", "ftp", "mail", "mysql", "postgres", "proxy", "smtp", "user"})

_FORMATS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"  # GitHub, GitLab
    r"|sk-(?=[\w-]{0,200}\d)[\w-]{20,}|gsk_[A-Za-z0-9]{30,}|r8_[A-Za-z0-9]{30,}"  # OpenAI and others
    r"|wandb_v1_\w{20,}|xox[abeoprs]-[\w-]{10,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"  # Slack, Stripe
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[\w-]{35}"  # Amazon, Google
    r"|pypi-[\w-]{40,}|npm_[A-Za-z0-9]{36}|SG\.[\w-]{16,}\.[\w-]{16,}|dop_v1_[a-f0-9]{64}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r"|(?<=Bearer )[\w.~+/=-]{8,})",
    re.DOTALL,
)
_URL = re.compile(r"(?<=://)[^\s/:@]{0,200}:[^\s/]{1,500}@")
_LOGIN = re.compile(r"(?<![\w.+/:-])([\w.+-]{1,100}):[^\s:/@]{1,200}@(?!sha\d+:)(?=[\w-]+)")
_NAMED = re.compile(
    r"""(?<![\w.-])(\\*["'])?(?P<name>[A-Za-z_][\w./-]{0,100})(?(1)\\*["'])\s{0,5}(?P<sign>[:=])\s{0,5}"""
)
_VALUE = re.compile(
    r"""(?:Bearer|Basic|Token)\s+[^\s"',;]+|[^\s,;&"'\[\](){}\\]+(?!["'])"""
    r"""|b?\\*(?P<quote>["'])(?:(?!\\*(?P=quote)).){0,20000}(?:\\*(?P=quote))?|(?P<bracket>[\[({])|[^\s]+""",
    re.DOTALL,
)
LONGEST_BRACKET = 20_000
_NAME = re.compile(r"[\w.+/~-]{1,200}")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?|true|false|none|null", re.IGNORECASE)
_SEVERAL = re.compile(r"(tokens|keys|passwords|secrets|credentials)$", re.IGNORECASE)


def _strength(name: str) -> int:
    """Return 2 for a name whose value is always a secret, 1 for one whose text is, and else 0."""
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and (words[-1] in _ENDINGS or words[-1].isdecimal()):
        words.pop()
    before, last = (["", "", *words])[-2:]
    if _STRONG.fullmatch(last) or (last == "pass" and before in _OF_PASS):
        return 2
    if _WEAK.fullmatch(last):
        return 1
    is_secret = {
        "token": before not in _TEXT_TOKENS,
        "tokens": not before or before in _OF_TOKENS,
        "key": before in _OF_KEYS,
        "keys": before in _OF_KEYS,
    }
    return int(is_secret.get(last, False))


@functools.lru_cache(maxsize=4096)
def strength_of(name: object) -> int:
    """Return the largest strength of the parts of a name, which `/` and `.` separate."""
    return max(_strength(part) for part in re.split(r"[/.]", str(name)[-200:]))


def hide_secrets(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return nested values by name with `***` in place of secrets."""
    return {name: _hide(value, strength_of(name)) for name, value in values.items()}


def _hide(value: Any, strength: int) -> Any:
    """Return a value of a name; of one below a secret name all text is hidden."""
    if type(value) is float:
        return value
    if isinstance(value, Mapping):
        return {name: _hide(item, max(strength, strength_of(name))) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_hide(item, strength) for item in value]
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, str):
        return HIDDEN if value and strength else hide_in_text(value)
    is_number = isinstance(value, (bool, float)) or (strength < 2 and hasattr(value, "__float__"))
    return value if value is None or not strength or is_number else HIDDEN


def hide_in_text(text: str) -> str:
    """Return a text without logins of URLs, and values that have the format of a token or a secret name."""
    if text[:1] in ("{", "["):
        try:
            return json.dumps(_hide(json.loads(text), 0))
        except (ValueError, RecursionError):
            pass  # no JSON: text in brackets
    text = _URL.sub(f"{HIDDEN}@", _FORMATS.sub(HIDDEN, text))
    return _LOGIN.sub(rf"\1:{HIDDEN}@", "".join(_without_values(text)))


def _without_values(text: str) -> Iterator[str]:
    """Yield the parts of a text, with `***` in place of values that follow secret names."""
    position = 0
    for named in _NAMED.finditer(text):
        strength = strength_of(named["name"]) if named.start() >= position else 0
        before = text[max(named.start() - 20, 0) : named.start()].rstrip(" ")[-1:]
        is_prose = named["sign"] == ":" and not named[1] and strength < 2 and before not in "{,[(-\n"
        value = None if is_prose or not strength else _VALUE.match(text, named.end())
        if value is None or (strength < 2 and _NUMBER.fullmatch(value[0])):
            continue
        quote = value["quote"] or ""
        yield f"{text[position : value.start()]}{quote}{HIDDEN}{quote}"
        position = _end_of_bracket(text, value.start()) if value["bracket"] else value.end()
    yield text[position:]


def _end_of_bracket(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at a position."""
    depth = 0
    for position, letter in enumerate(text[start : start + LONGEST_BRACKET], start + 1):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth:
            return position
    return min(start + LONGEST_BRACKET, len(text))


def hide_secrets_of_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, without the values of options that have the name of a secret."""
    shown: list[str] = []
    option, is_first = "", False  # whose values follow, and whether this word is the first of them
    for word in words:
        is_option = word.startswith("-" if not is_first else "--")
        name, equals, value = word.partition("=")
        if option and not is_option:
            shown.append(_hide_value(option, word))
            option, is_first = option if _SEVERAL.search(option) else "", False
        elif equals and _NAME.fullmatch(name):
            shown.append(f"{name}={_hide_value(name, value)}")
            option, is_first = "", False
        else:
            shown.append(hide_in_text(word))
            option, is_first = (word, True) if word.startswith("-") and strength_of(word) else ("", False)
    return shown


def _hide_value(name: str, value: str) -> str:
    """Return the text of an option or a variable; a count is shown."""
    strength = strength_of(name)
    if not value or not strength or (strength < 2 and _NUMBER.fullmatch(value)):
        return hide_in_text(value)
    return HIDDEN
