"""Replacement of passwords, tokens and private keys in the records of a run, by names and by formats.

The folder of a project is often uploaded as a whole. `secret_names.py` recognizes the names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from accelerate.monitoring.secret_names import Strength, is_special, looks_random, strength_of

HIDDEN = "***"
"""Written in place of a secret."""

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
_USER_INFO = re.compile(r"(?<=://)[^\s/:@]{8,200}(?=@)")
_SIGNATURE = re.compile(r"(?i)([?&][\w-]{0,40}sig(?:nature)?=)[^\s&#\"']+")
_COOKIE = re.compile(r"(?i)(?<![\w-])((?:set-)?cookie: {0,5})[^\r\n\"']+")
_USER_OPTION = r"-u|--?(?:[\w-]{0,40}[_-])?user"
_USER = re.compile(rf"((?<![\w-])(?:{_USER_OPTION})[ =]{{1,5}}[^\s:/@\"']{{1,100}}:)(?!\d+\b)[^\s\"']+")
_USER_NAMES = frozenset({"user", "username", "login", "email"})
_NAMED = re.compile(
    r"""(?<![\w.-])(\\*["'])?(?P<dash>-{1,5})?(?P<name>[A-Za-z_][\w./-]{0,100})(?(1)\\*["'])"""
    r"""(?:\s{0,5}(?P<sign>[:=])\s{0,5}|(?(dash)(?(1)\s{0,5},\s{0,5}|\s{1,5})|(?!)))"""
)
_VALUE = re.compile(
    r"""(?i:bearer|basic|token)\s+[^\s"',;]+|(?!b?\\*["'])[^\s,;&"'\[\](){}\\]+"""
    r"""|b?\\*(?P<quote>["'])(?:(?!\\*(?P=quote)).){0,20000}(?:\\*(?P=quote))?|(?P<bracket>[\[({])|[^\s]+""",
    re.DOTALL,
)
LONGEST_BRACKET = 20_000
_NAME = re.compile(r"[\w.+/~-]{1,200}")
_SHORT_WORD = re.compile(r"[a-z]{1,3}")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?|true|false|none|null", re.IGNORECASE)
_SEVERAL = re.compile(r"(tokens|keys|passwords|secrets|credentials)$", re.IGNORECASE)


def hide_secrets(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns nested values by name with `***` in place of secrets."""
    return _hide_mapping(values, Strength.NONE, "")


def _hide_mapping(values: Mapping[Any, Any], strength: Strength, parent: object) -> dict[Any, Any]:
    """Returns the values of a name, where a `key` of `wandb` and the `pass` of a user are secret, too."""
    is_login = any(str(name).lower() in _USER_NAMES for name in values)
    parents = (parent, "user") if is_login else (parent,)
    shown = {}
    for name, item in values.items():
        own = max(strength_of(f"{name}" if not outer else f"{outer}/{name}") for outer in parents)
        shown[name] = _hide(item, max(strength, own), name)
    return shown


def _hide(value: Any, strength: Strength, name: object = "") -> Any:
    """Returns a value of a name, with all text hidden below a secret name."""
    if type(value) is float:
        return value
    if isinstance(value, Mapping):
        return _hide_mapping(value, strength, name)
    if isinstance(value, (list, tuple, set, frozenset)):
        if not strength and any(isinstance(item, str) and item[:1] == "-" for item in value):
            return _hide_words(value)
        return [_hide(item, strength, name) for item in value]
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "replace")
    if isinstance(value, str):
        return hide_in_text(value) if _is_shown(value, strength) else HIDDEN
    is_number = isinstance(value, (bool, float)) or (
        strength < Strength.ALWAYS and hasattr(value, "__float__")
    )
    return value if value is None or not strength or is_number else HIDDEN


def _is_shown(text: str, strength: Strength) -> bool:
    return not text or not strength or (strength is Strength.UNLESS_SPECIAL and is_special(text))


def hide_in_text(text: str) -> str:
    """Returns a text without logins of URLs, and values that have the format of a token or a secret name."""
    if text[:1] in ("{", "["):
        try:
            return json.dumps(_hide(json.loads(text), Strength.NONE))
        except (ValueError, RecursionError):
            pass  # no JSON: text in brackets
    text = _URL.sub(f"{HIDDEN}@", _FORMATS.sub(HIDDEN, text))
    text = _USER_INFO.sub(lambda user: HIDDEN if looks_random(user[0]) else user[0], text)
    for pattern in (_SIGNATURE, _COOKIE, _USER):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _LOGIN.sub(rf"\1:{HIDDEN}@", "".join(_without_values(text)))


def _without_values(text: str) -> Iterator[str]:
    """Yields the parts of a text, with `***` in place of values that follow secret names."""
    position = 0
    for named in _NAMED.finditer(text):
        strength = strength_of(named["name"]) if named.start() >= position else Strength.NONE
        value = _VALUE.match(text, named.end()) if strength else None
        if value is None:
            continue
        end = _end_of_bracket(text, value.start()) if value["bracket"] else value.end()
        if _is_harmless(named, text[value.start() : end], strength):
            continue
        quote = value["quote"] or ""
        yield f"{text[position : value.start()]}{quote}{HIDDEN}{quote}"
        position = end
    yield text[position:]


def _is_harmless(named: re.Match[str], value: str, strength: Strength) -> bool:
    """Returns whether a value that follows a secret name in a text is prose, a number or another option."""
    if strength < Strength.ALWAYS and _NUMBER.fullmatch(value):
        return True
    if not named["sign"]:  # "--name value"
        plain = value.strip("\\\"'")
        is_option = plain[:1] == "-" and not looks_random(plain)
        return is_option or value[:1] == "(" or _SHORT_WORD.fullmatch(value) is not None
    before = named.string[max(named.start() - 20, 0) : named.start()].rstrip(" ")[-1:]
    if named["sign"] == ":" and not named[1] and strength < Strength.ALWAYS and before not in "{,[(-\n":
        return True
    return _is_shown(value, strength)


def _end_of_bracket(text: str, start: int) -> int:
    """Returns the position after the bracket that closes the one at a position."""
    depth = 0
    for position, letter in enumerate(text[start : start + LONGEST_BRACKET], start + 1):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth:
            return position
    return min(start + LONGEST_BRACKET, len(text))


def hide_secrets_of_command(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line, without the values of options that have the name of a secret."""
    return _hide_words(words)


def _hide_words(words: Iterable[Any]) -> list[Any]:
    shown: list[Any] = []
    option, is_first = "", False  # option whose values follow, and whether this word is the first of them
    previous = ""
    for word in words:
        text = word if isinstance(word, str) else ""
        is_option = text.startswith("--" if is_first else "-") and not (is_first and looks_random(text))
        name, equals, value = text.partition("=")
        if option and not is_option:
            shown.append(_hide_value(option, word))
            option, is_first = option if _SEVERAL.search(option) else "", False
        elif equals and _NAME.fullmatch(name):
            shown.append(hide_in_text(f"{name}={_hide_value(name, value)}"))
            option, is_first = "", False
        else:
            start = f"{previous} " if re.fullmatch(_USER_OPTION, previous) else ""
            shown.append(hide_in_text(start + text)[len(start) :] if text else _hide(word, Strength.NONE))
            option, is_first = (text, True) if text.startswith("-") and strength_of(text) else ("", False)
        previous = text
    return shown


def _hide_value(name: str, value: Any) -> Any:
    """Returns the value of an option or a variable, where a count is shown."""
    strength = strength_of(name)
    if not isinstance(value, str):
        return _hide(value, strength)
    is_count = strength < Strength.ALWAYS and _NUMBER.fullmatch(value)
    return hide_in_text(value) if is_count or _is_shown(value, strength) else HIDDEN
