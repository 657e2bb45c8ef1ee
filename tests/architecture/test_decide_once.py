"""Each choice is made in one file: nothing else compares the kind of hardware or the method of training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from accelerate.devices import BACKENDS

DEVICE_TYPES = {backend.name for backend in BACKENDS}
"""The words of the hardware table. "meta" is none of them: such a tensor has no values."""
DEVICE_WORDS = {"device_type", "hardware", "kind", "kinds", "name", "type"}
"""Names of variables and attributes that hold a device type, where they are compared with a string."""
METHODS = {"fsdp_version", "is_fsdp2", "zero_stage"}
"""Attributes that say which method trains; a strategy has a method instead."""
RESOLVING = ("devices/", "test_utils/")
"""Where hardware is chosen, and where tests of a machine are skipped."""

ALLOWED = {
    "launch/script.py": "the label is an argument of a public class",
    "precision/fp8.py": "the vendor of the hardware chooses the package to import",
    "strategies/resolve.py": "chooses the strategy of a machine",
}
"""Files that may ask, and why."""


def last_name(node: ast.expr) -> str:
    """The last part of a name: `version` of `plugin.version`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def entries(node: ast.expr) -> list[ast.expr]:
    """The entries of a literal container; none of anything else."""
    if isinstance(node, ast.Call) and last_name(node.func) in ("frozenset", "set") and node.args:
        node = node.args[0]
    return node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else []


def is_choice(node: ast.expr, is_device: bool) -> bool:
    """Whether a value is a row of the hardware table, a label, or a device type beside a word for one."""
    if isinstance(node, ast.Constant):
        return is_device and node.value in DEVICE_TYPES
    if isinstance(node, ast.Attribute):
        owner = last_name(node.value)
        is_row = owner == "hardware_table" and node.attr.lower() in DEVICE_TYPES
        return owner == "DistributedType" or is_row or node.attr in METHODS
    return last_name(node) in METHODS


def constant_choices(tree: ast.Module) -> set[str]:
    """Names of constants of a file that are containers of choices only."""
    return {
        statement.targets[0].id
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and entries(statement.value)
        and all(is_choice(entry, True) for entry in entries(statement.value))
    }


def conditions(node: ast.AST) -> list[ast.expr]:
    """The values whose truth a node tests."""
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def questions(tree: ast.Module) -> Iterator[str]:
    """The expressions of a file that compare the hardware or the method."""
    constants = constant_choices(tree)
    for node in ast.walk(tree):
        yield from (ast.unparse(test) for test in conditions(node) if last_name(test) in METHODS)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_device = any(last_name(side) in DEVICE_WORDS for side in sides)
            sides += [entry for side in sides for entry in entries(side)]
            if any(is_choice(side, is_device) or last_name(side) in constants for side in sides):
                yield ast.unparse(node)


def test_only_the_deciding_file_compares(sources: list[Any]) -> None:
    found = {
        str(source): asked
        for source in sources
        if not str(source).startswith(RESOLVING) and (asked := list(questions(source.tree)))
    }
    unknown = {path: asked for path, asked in found.items() if path not in ALLOWED}
    assert not unknown, "make it a column of DeviceBackend or a method of the strategy"
    assert found.keys() == ALLOWED.keys(), "remove from the list what does not ask any more"
    assert len(ALLOWED) <= 10


def test_comparisons_of_hardware_and_strategies_are_found() -> None:
    asking = """
if device.type == "cuda" or backend is hardware_table.XLA or kind in ("xla", "cpu"): pass
if state.distributed_type in SPLIT or state.distributed_type != DistributedType.NO: pass
if plugin.fsdp_version == 2 or not plugin.is_fsdp2 or (1 if zero_stage else 2): pass
SPLIT = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""
    others = """
if tensor.device.type == "meta" or place == "cpu" or place in PLACES or backend.is_host: pass
PLACES = ("cpu", "disk")
"""
    assert len(list(questions(ast.parse(asking)))) == 8
    assert list(questions(ast.parse(others))) == []
