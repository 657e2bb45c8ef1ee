"""Values of expressions of numbers and names in the code of a forward, such as those of `f"block{i}"`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (dict, enumerate, int, len, list, max, min, range, reversed, sorted, str, tuple, zip)
}
_METHODS = ("items", "keys", "values")
_NODES = (
    *(ast.Load, ast.Constant, ast.Name, ast.Attribute, ast.JoinedStr, ast.FormattedValue, ast.keyword),
    *(ast.List, ast.Tuple, ast.Dict, ast.Subscript, ast.Slice, ast.Call, ast.Starred),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub),
)
_MOST = 512
"""Largest number of entries of a list."""


def value_of(node: ast.AST, module: nn.Module, own: str, variables: Mapping[str, Any]) -> Any:
    """Returns the number, text or list of those that an expression has in each forward, or None.

    Args:
        module: The module to whose method the expression belongs.
        variables: Values of local variables by name.
    """
    if not (
        isinstance(node, ast.expr) and all(_is_known(each, module, own, variables) for each in ast.walk(node))
    ):
        return None
    code = compile(ast.fix_missing_locations(ast.Expression(node)), "<forward>", "eval")
    try:
        value = eval(code, {"__builtins__": {}}, {**_FUNCTIONS, **variables, own: module})
    except Exception:  # as the forward itself would raise, in a branch that it does not enter
        return None
    if isinstance(value, (str, int)):
        return value
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, nn.ParameterList) else []
    return values if 0 < len(values) <= _MOST and all(map(_is_plain, values)) else None


def _is_known(node: ast.AST, module: nn.Module, own: str, variables: Mapping[str, Any]) -> bool:
    """Returns whether a part of an expression can be computed without effects."""
    if isinstance(node, ast.Name):
        return node.id in variables or node.id in _FUNCTIONS or node.id == own
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id == own
        return (
            node.attr in (vars(module).keys() | module._modules.keys()) if is_own else node.attr in _METHODS
        )
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) or (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        )
    return isinstance(node, _NODES)


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int)) or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))
