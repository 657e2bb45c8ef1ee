"""Recognition of names whose values are secret, such as `hub_token`, `hubToken`, `HUB-TOKEN` and `hubtoken`.

A name is split into words at separators, at changes of case, and where it consists of known words only. The
last words decide, so `max_tokens`, `pad_token`, `tokenizer` and `monkey` are not secret.
"""

from __future__ import annotations

import functools
import re
from enum import IntEnum


class Strength(IntEnum):
    """Values of a name that are secret."""

    NONE = 0
    UNLESS_SPECIAL = 1  # text, unless it looks like a special token of a tokenizer
    TEXT = 2  # all text, but no numbers
    ALWAYS = 3  # numbers, too


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ENDINGS = frozenset({"value", "text", "string", "str", "json", "base", "b", "bytes", "raw"})  # base64
_ALWAYS = re.compile(
    r"(\w*(password|passwd|passphrase|pwd)|secret|credential|cred|cookie|jwt|authorization"
    r"|apikey|privatekey|secretkey)s?"
)
"""Words that are secret as the last one of a name, whole numbers included."""
_SERVICES = frozenset(
    {"anthropic", "aws", "azure", "clearml", "cohere", "comet", "gcp", "gemini", "github", "gitlab", "google"}
    | {"groq", "hf", "hub", "huggingface", "mistral", "neptune", "openai", "pinecone", "replicate", "slack"}
    | {"swanlab", "together", "wandb"}
)
_OF_KEYS = _SERVICES | {
    *("access", "account", "api", "auth", "client", "deploy", "encryption", "gpg", "hmac", "license"),
    *("master", "pgp", "private", "rsa", "secret", "service", "signing", "ssh", "subscription"),
}
"""Words before "key" that make it secret: others are keys of dictionaries, of sorting, of attention."""
_OF_TOKENS = _SERVICES | {"access", "api", "auth", "bearer", "refresh", "secret", "session"}
"""Words before "token" and "tokens" that make all their text secret."""
_OF_DOUBTFUL_TOKENS = frozenset({"", "bot", "user"})
"""Words before "tokens" that make text secret that looks random: after others it is a count or a text."""
_OF_TEXT_TOKENS = frozenset(
    {"additional", "audio", "begin", "bos", "boi", "class", "cls", "end", "eoi", "eos", "eot", "first"}
    | {"image", "img", "last", "mask", "max", "next", "new", "num", "pad", "per", "prefix", "prompt"}
    | {"replacement", "sep", "special", "start", "stop", "suffix", "unexpected", "unk", "unknown"}
    | {"video", "word"}
)
"""Words before "token" that make it one of a text."""
_OF_PASS = frozenset({"admin", "db", "database", "ftp", "mail", "mysql", "postgres", "proxy", "smtp", "user"})
_PAIRS = frozenset(
    {("session", "id"), ("secret", "id"), ("", "auth"), ("", "bearer")}
    | {(service, "pat") for service in _SERVICES}
)
"""The last two words of further names whose text is secret; "" is any word."""
_SECRET_WORDS = frozenset({"token", "tokens", "key", "keys", "pass", "pat", "secret", "password"})
_VOCABULARY = sorted(
    {*_OF_KEYS, *_OF_TOKENS, *_OF_PASS, *_SECRET_WORDS, "bot", "id"}, key=len, reverse=True
)  # longer words first
_JOINED = re.compile(f"({'|'.join(_VOCABULARY)})((?:{'|'.join(_VOCABULARY)})*)")


def _split(word: str) -> list[str]:
    """Returns the known words that a word consists of, or else the word."""
    parts, rest = [], word
    while rest:
        match = _JOINED.fullmatch(rest)
        if match is None:
            return [word]
        parts.append(match[1])
        rest = match[2]
    return parts


def _strength(name: str) -> Strength:
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and (words[-1] in _ENDINGS or words[-1].isdecimal()):
        words.pop()
    if words and _ALWAYS.fullmatch(words[-1]):
        return Strength.ALWAYS
    words = [part for word in words for part in _split(word)]
    if words[-2:-1] and words[-1] in _SERVICES and words[-2] in _SECRET_WORDS:
        words.insert(-2, words.pop())  # token_hf
    if words[-2:] == ["key", "id"]:
        words.pop()
    before, last = ["", "", *words][-2:]
    if _ALWAYS.fullmatch(last) or (last == "pass" and before in _OF_PASS):
        return Strength.ALWAYS
    if {(before, last), ("", last)} & _PAIRS:
        return Strength.TEXT
    return _strength_of_token_or_key(before, last)


def _strength_of_token_or_key(before: str, last: str) -> Strength:
    if last in ("key", "keys"):
        return Strength.TEXT if before in _OF_KEYS else Strength.NONE
    if last == "token" and before not in _OF_TEXT_TOKENS:
        return Strength.TEXT if before in _OF_TOKENS | {""} else Strength.UNLESS_SPECIAL
    if last == "tokens" and before in _OF_TOKENS:
        return Strength.TEXT
    return Strength(last == "tokens" and before in _OF_DOUBTFUL_TOKENS)


@functools.lru_cache(maxsize=4096)
def strength_of(name: object) -> Strength:
    """Returns the largest strength of the parts of a name between `/` and `.`, and of two parts together."""
    parts = re.split(r"[/.]", str(name)[-200:])
    pairs = [f"{first}_{second}" for first, second in zip(parts, parts[1:], strict=False)]
    return max(_strength(part) for part in [*parts, *pairs])


_RANDOM = re.compile(r"[A-Za-z]\d+[A-Za-z]|\d[A-Za-z]+\d|[a-z](?:[A-Z]{1,2}[a-z]{1,2}){2}[A-Z]|\w{32}")
_SPECIAL = re.compile(
    r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]|[A-Z]?[a-z]{1,11}\d{0,2}|[A-Z]{1,12}\d{0,2}|\W{1,12}"
    r"|[-+]?\d{1,20}(?:\.\d{1,20})?"
)


def looks_random(text: str) -> bool:
    """Returns whether a part of a text mixes letters and digits or cases like a generated secret."""
    return any(len(part) >= 8 and _RANDOM.search(part) for part in re.split(r"[\W_]+", text))


def is_special(text: str) -> bool:
    """Returns whether a text consists of special tokens, such as `<|user|>`, `[SEP]` or `sep`, or numbers."""
    text = text.strip("\\\"'")
    if text[:1] in ("[", "(") and re.search(r"[\s,'\"]", text):
        text = text[1:-1]
    parts = [part.strip("\\\"'") for part in re.split(r"[\s,]+", text)]
    return all(not part or (_SPECIAL.fullmatch(part) and not looks_random(part)) for part in parts)
