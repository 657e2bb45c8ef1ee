"""Sections -> the JSON Schema of the configuration file, with which editors complete and check it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.base import SageMakerDistributedType
from accelerate.settings.env import SECTIONS
from accelerate.settings.migrations import RETIRED, TOP_LEVEL_DYNAMO
from accelerate.settings.option import Option, Section
from accelerate.settings.sections import PARADIGM_OF_TYPE

SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
"""The shipped schema; `make reference` writes it."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"
YES_OR_NO = ["yes", "no", "true", "false", "y", "n", "on", "off", "1", "0"]
NUMBER = r"^\s*[-+]?[0-9_]+\s*$"
FRACTION = r"^\s*[-+]?[0-9_]*\.?[0-9]+([eE][-+]?[0-9]+)?\s*$"

SHAPES: dict[type, list[dict[str, Any]]] = {
    bool: [{"type": "boolean"}, {"enum": YES_OR_NO}],
    int: [{"type": "integer"}, {"type": "string", "pattern": NUMBER}],
    float: [{"type": "number"}, {"type": "string", "pattern": FRACTION}],
    str: [{"type": ["string", "number", "boolean"]}],
    tuple: [{"type": "array"}, {"type": "string"}],
    dict: [{"type": "object"}],
}
"""What a file may say for an option of each type: the type itself, or the text that is read as one."""


def make_schema() -> dict[str, Any]:
    """Describe every key that a configuration file may have."""
    return {
        "$schema": DIALECT,
        "title": "Configuration file of accelerate",
        "description": "Where and how `accelerate launch` runs scripts; absent keys have their default.",
        "type": "object",
        "additionalProperties": False,
        "properties": {**_top_level(), **_groups(), **_old_keys()},
    }


def as_text() -> str:
    """The schema as it is written to its file."""
    return json.dumps(make_schema(), indent=1, sort_keys=True) + "\n"


def _top_level() -> dict[str, Any]:
    own = (section for section in SECTIONS if section.file_key is None)
    properties = {row.key: _property(row) for row in _rows(own) if row.key}
    ways = [*PARADIGM_OF_TYPE, "TPU", *(kind.value for kind in SageMakerDistributedType)]
    properties["distributed_type"]["anyOf"] = [_words(ways), {"const": False}, {"type": "null"}]
    return properties


def _groups() -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for section in SECTIONS:
        if section.file_key is None:
            continue
        group = {
            "description": str(section.__doc__).splitlines()[0],
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {},
        }
        properties = groups.setdefault(section.file_key, group)["properties"]
        for row in (row for row in section.options() if row.key):
            properties.update(_nested(row, section.file_key))
    return groups


def _nested(row: Option, group: str) -> dict[str, Any]:
    """The key of an option in its group, and the other spellings under which it is read."""
    described = _property(row)
    others = {row.name} - {row.key}
    if group == "dynamo_config":
        others.add(row.name.removeprefix("dynamo_"))
    if row.key == "fsdp_backward_prefetch":
        others.add("fsdp_backward_prefetch_policy")
    old = {**described, "deprecated": True}
    return {str(row.key): described, **dict.fromkeys(sorted(others), old)}


def _old_keys() -> dict[str, Any]:
    retired = {key: {"deprecated": True, "description": f"No effect: {why}."} for key, why in RETIRED.items()}
    flat = {row.name: row for row in _rows(SECTIONS) if row.name in TOP_LEVEL_DYNAMO}
    moved = {name: {**_property(row), "deprecated": True} for name, row in flat.items()}
    fp16 = {"fp16": {"anyOf": SHAPES[bool], "deprecated": True, "description": "Now mixed_precision: fp16."}}
    return {**retired, **moved, **fp16}


def _rows(sections: Iterable[type[Section]]) -> list[Option]:
    return [row for section in sections for row in section.options()]


def _property(row: Option) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": row.help, "anyOf": [*_shapes(row), {"type": "null"}]}
    if isinstance(row.default, (bool, int, float, str)):
        schema["default"] = row.default
    return schema


def _shapes(row: Option) -> list[dict[str, Any]]:
    if not row.choices:
        known = [{"enum": list(row.offers)}] if row.offers and row.kind is str else []
        return [*known, *(_limited(shape, row) for shape in SHAPES[row.kind])]
    numbers = [{"enum": [int(choice) for choice in row.choices]}] if row.kind is int else []
    return [*numbers, _words(row.choices)]


def _limited(shape: dict[str, Any], row: Option) -> dict[str, Any]:
    if row.limits is None or shape.get("type") == "string":
        return shape
    return {**shape, "minimum": row.limits[0], "maximum": row.limits[1]}


def _words(choices: Iterable[str]) -> dict[str, Any]:
    """One of these words, in the usual spellings: letters may be of either case."""
    spelled = [spell for choice in choices for spell in (choice, choice.lower(), choice.upper())]
    return {"enum": list(dict.fromkeys(spelled))}
