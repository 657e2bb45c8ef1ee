"""Check what a manifest says before anything relies on it: types, ranges, names that stay in the folder."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from accelerate.base import CheckpointError, refuse_outside
from accelerate.checkpointing.files import ALGORITHM

MANIFEST = "manifest.json"
FORMAT = 1
LARGEST = 2**63 - 1
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class Rule(NamedTuple):
    """What a field may be.

    Attributes:
        expected: in words.
        fits: whether a value, as JSON gives it, is one.
        required: whether there is no default.
    """

    expected: str
    fits: Callable[[Any], bool]
    required: bool = False


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


_COUNT = Rule("a whole number of 0 or more", _is_count)
_TEXT = Rule("printable text", _is_text)

_FIELDS = {
    "format": Rule(f"the number {FORMAT}", lambda value: type(value) is int and value == FORMAT),
    "algorithm": Rule(f"{ALGORITHM!r}, the only kind of checksum", lambda value: value == ALGORITHM),
    "files": Rule("a JSON object of file names and records", lambda value: isinstance(value, dict), True),
    "world_size": Rule("a whole number of 1 or more", lambda value: _is_count(value) and value > 0, True),
    "step": _COUNT,
    "epoch": _COUNT,
    "iteration": Rule(
        "a whole number of 0 or more, or null", lambda value: value is None or _is_count(value)
    ),
    "created": _TEXT,
    "software": _TEXT,
    "torch": _TEXT,
    "run": Rule("a JSON object", lambda value: isinstance(value, dict)),
}
_RECORD = {
    "size": _COUNT._replace(required=True),
    "checksum": Rule(
        "16 hexadecimal digits", lambda value: _is_text(value) and bool(_CHECKSUM.fullmatch(value)), True
    ),
    "rank": _COUNT,
}
_RUN = {
    "sync_gradients": Rule("true or false", lambda value: isinstance(value, bool)),
    "num_steps": _COUNT,
    "updates": Rule("a list of whole numbers of 0 or more", _are_counts),
    "gradient_order": Rule(
        "a list of lists of whole numbers of 0 or more",
        lambda value: isinstance(value, list) and all(map(_are_counts, value)),
    ),
    "save": _TEXT,
}


def check_fields(content: Mapping[str, Any]) -> None:
    """Refuse a manifest with a missing, an unknown or a wrong field, or with a name that is not a plain one.

    Args:
        content: all fields, as JSON gives them, without the seal.

    Raises:
        CheckpointError: names the field, its value and what is expected.
    """
    _check(content, _FIELDS, "")
    for name, record in content["files"].items():
        if reason := refuse_name(name):
            raise CheckpointError(f"{MANIFEST} names the file {shorten(name)}, which {reason}")
        place = f"files[{shorten(name)}]"
        if not isinstance(record, dict):
            raise _wrong(place, record, "a JSON object of size, checksum and rank")
        _check(record, _RECORD, f"{place}.")
    known = {name: value for name, value in content.get("run", {}).items() if name in _RUN}
    _check(known, _RUN, "run.")


def refuse_name(name: object) -> str | None:
    """Say why a name cannot be that of a file of a checkpoint; None where it can.

    Args:
        name: path of a file, relative to the folder.
    """
    if reason := refuse_outside(name):
        return reason
    assert isinstance(name, str)
    if "\\" in name:
        return "contains a backslash, which separates folders on some systems"
    if PurePosixPath(name).as_posix() != name:
        return "is not written as a plain path: it has empty components, or components '.'"
    if name == MANIFEST:
        return "is the manifest itself"
    return None


def spell_name(name: str) -> str:
    """Return the name of a file for messages: as it is, or escaped where a terminal cannot show it."""
    return name if name.isprintable() else repr(name)


def shorten(value: object) -> str:
    """Return the representation of a value, shortened for messages."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxlevel = 2
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def _check(content: Mapping[str, Any], rules: Mapping[str, Rule], place: str) -> None:
    for name, rule in rules.items():
        if name not in content:
            if rule.required:
                raise CheckpointError(f"{MANIFEST} has no field {place}{name}, which holds {rule.expected}")
        elif not rule.fits(content[name]):
            raise _wrong(f"{place}{name}", content[name], rule.expected)
    if unknown := [name for name in content if name not in rules]:
        raise CheckpointError(
            f"{MANIFEST} has a field {place}{shorten(unknown[0])} that format {FORMAT} does not know: "
            "other software made it"
        )


def _wrong(field: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{MANIFEST} has {field}={shorten(value)}, and {expected} is expected")
