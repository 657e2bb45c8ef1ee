"""Modules hold no state: what changes while a process runs is in a state class or in `ProcessServices`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

CHANGES = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}
"""Methods that change a container."""
STATEFUL = {"count", "cycle", "deque", "set", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "Lock"}
"""Classes whose objects change as they are used."""

ALLOWED = {
    "base/packages.py: PACKAGES": "its rows are added while the file is imported, and not afterwards",
    "base/stack_dumps.py: _files": "`state` is to its right; the file stays open for a signal handler",
    "plugins/megatron_models.py: MODEL_CONFIGS_TO_MEGATRON_PARSERS": "public table that users add rows to",
    "tracking/registry.py: LOGGER_TYPE_TO_CLASS": "public table that users add rows to",
}


def own_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a file and of the bodies of its classes, whose attributes all instances share."""
    yield from tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from node.body


def names_of(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement binds, with their value."""
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    else:
        return
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, value


def changed_names(tree: ast.AST) -> Iterator[str]:
    """The names whose objects some line of a file changes: a method, an item, an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            owner = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            owner = node.value
        else:
            continue
        if isinstance(owner, ast.Name):
            yield owner.id


def is_stateful(value: ast.expr) -> bool:
    """Whether a value is an object that changes as it is used, or an empty container to be filled."""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        return name in STATEFUL
    return isinstance(value, (ast.List, ast.Set)) and not value.elts


def local_names(tree: ast.Module) -> set[str]:
    """Names that functions of a file bind for themselves."""
    return {
        node.id
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def test_no_module_holds_state(sources: list[Any]) -> None:
    found = set()
    for source in (source for source in sources if source.parts[1] != "state"):
        changed = set(changed_names(source.tree)) - local_names(source.tree)
        for statement in own_statements(source.tree):
            found |= {
                f"{source}: {name}"
                for name, value in names_of(statement)
                if name != "__all__" and (name in changed or is_stateful(value))
            }
    assert found == set(ALLOWED), "put it into a service: accelerate.state.services"


def test_no_function_assigns_a_global_name(sources: list[Any]) -> None:
    found = [
        f"{source}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert not found, "put it into a service: accelerate.state.services"
