"""A script's own arguments as names and values, as job services want them."""

from __future__ import annotations

from typing import Any

from accelerate.base import wrong_value


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """Read a script's own arguments as names and values; a flag without a value is ``True``.

    Args:
        nargs: words such as ``--epochs 3 --fast``.

    Raises:
        ConfigurationError: a value has no name before it.
    """
    result: dict[str, Any] = {}
    name: str | None = None
    for word in nargs:
        if word.startswith("--") or (word.startswith("-") and not _is_number(word)):
            name, _, text = word.lstrip("-").partition("=")
            result[name] = _value_of(text) if "=" in word else True
        elif name is None:
            raise wrong_value("argument", word, "it belongs to no option", "Write arguments as --name value")
        else:
            result[name] = _value_of(word)
    return result


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value_of(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
