"""What a manifest may say: wrong types, ranges and names are one error that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.base import CheckpointError
from accelerate.checkpointing import check_fields, refuse_name

RECORD = {"size": 1, "checksum": "0123456789abcdef", "rank": 0}
NESTED: list[Any] = []
for _ in range(50):
    NESTED = [NESTED]


def content(**changes: Any) -> dict[str, Any]:
    return {"files": {"a.bin": RECORD}, "world_size": 2, "step": 3, "format": 1, **changes}


def test_a_valid_one_passes() -> None:
    check_fields(content(iteration=None, run={"updates": [1], "gradient_order": [[0]], "mine": {"x": None}}))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("files", [], r"files=\[\], and a JSON object"),
        ("files", {"a": 1}, r"files\['a'\]=1, and a JSON object of size, checksum and rank"),
        ("files", {"a": {**RECORD, "size": "1"}}, r"files\['a'\]\.size='1', and a whole number"),
        ("files", {"a": {**RECORD, "size": -1}}, r"size=-1, and a whole number of 0 or more is expected"),
        ("files", {"a": {**RECORD, "size": 10**400}}, r"size=1000+\.\.\.0+, and"),
        ("files", {"a": {**RECORD, "size": True}}, "size=True, and"),
        ("files", {"a": {**RECORD, "checksum": 7}}, "checksum=7, and 16 hexadecimal digits"),
        ("files", {"a": {**RECORD, "checksum": "0"}}, "checksum='0', and"),
        ("files", {"a": {**RECORD, "rank": None}}, "rank=None, and"),
        ("files", {"a": {"size": 1}}, r"no field files\['a'\]\.checksum, which holds 16 hexadecimal"),
        ("files", {"a": {**RECORD, "mode": 7}}, r"a field files\['a'\]\.'mode' that format 1 does not know"),
        ("files", {"../a": RECORD}, r"names the file '\.\./a', which has a component '\.\.'"),
        ("world_size", 0, "world_size=0, and a whole number of 1 or more"),
        ("world_size", -2, "world_size=-2, and"),
        ("world_size", "2", "world_size='2', and"),
        ("step", [1], r"step=\[1\], and"),
        ("step", 1.5, r"step=1\.5, and"),
        ("epoch", None, "epoch=None, and"),
        ("iteration", "4", "iteration='4', and a whole number of 0 or more, or null"),
        ("created", 5, "created=5, and printable text is expected"),
        ("created", "\x1b[2J", "created='.x1b.2J', and printable text"),
        ("created", "\ud800", "created='.ud800', and"),
        ("torch", NESTED, r"torch=\[\[\[?\.\.\.\]"),
        ("run", [], r"run=\[\], and"),
        ("run", {"updates": 7}, r"run\.updates=7, and a list of whole numbers"),
        ("run", {"updates": ["7"]}, r"run\.updates=\['7'\], and"),
        ("run", {"gradient_order": [[1], 2]}, r"run\.gradient_order=\[\[1\], 2\], and"),
        ("run", {"sync_gradients": 1}, r"run\.sync_gradients=1, and true or false"),
        ("algorithm", "md5", "algorithm='md5', and 'xxh3_64'"),
        ("format", "1", "format='1', and the number 1"),
        ("surprise", 1, "has a field 'surprise' that format 1 does not know"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        check_fields(content(**{field: value}))
    assert len(str(error.value)) < 300


def test_a_missing_field_is_named() -> None:
    whole = content()
    del whole["world_size"]
    with pytest.raises(CheckpointError, match="has no field world_size"):
        check_fields(whole)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "names no file"),
        (".", "names no file"),
        ("/etc/passwd", "absolute"),
        ("a/../../b", "component '..'"),
        ("a\0b", "NUL"),
        ("..\\b", "backslash"),
        ("C:\\b", "backslash"),
        ("a//b", "plain path"),
        ("./a", "plain path"),
        ("a/", "plain path"),
        ("manifest.json", "manifest itself"),
        (7, "not text"),
    ],
)
def test_a_name_that_is_no_plain_path_in_the_folder_is_refused(name: object, reason: str) -> None:
    assert reason in (refuse_name(name) or "")


@pytest.mark.parametrize("name", ["a.bin", "deep/b.bin", ".metadata", "a b", "ünï", "..a", "a\udcff"])
def test_other_names_are_accepted(name: str) -> None:
    assert refuse_name(name) is None
