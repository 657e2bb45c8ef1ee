"""Order in which the code of a forward calls the modules of its module."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

_ENTRY = "[]"
"""Name of an entry of a list in a path."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_VIEWS = (("values",), ("items",), ("children",))
_METADATA = frozenset({"device", "dim", "dtype", "ndim", "numel", "requires_grad", "shape", "size"})
"""Attributes of tensors that do not depend on their values."""
Loop = ast.AST | None
Path = tuple[str, ...]
"""Names of attributes, such as `("layers", "[]", "norm")` for `self.layers[0].norm`."""


class Use(NamedTuple):
    """Use of an attribute of a module in the code of its forward.

    Attributes:
        name: Name of the attribute.
        is_call: Whether a module is called or passed to a function, and not only read.
        reads_weight: Whether the values of a parameter of the module are used, which has no buffers.
        loop: The innermost loop around the use, or None.
    """

    name: str
    is_call: bool
    reads_weight: bool
    loop: Loop


def uses_in_order(module: nn.Module) -> list[Use]:
    """Returns the uses of the attributes of a module in the code of its forward, in the order of execution.

    Methods that the forward calls are replaced by the uses in them. Branches follow each other.

    Args:
        module: The module. There are no uses if its source code is not available.
    """
    forward: Any = vars(module).get("forward")
    method = forward.__name__ if getattr(forward, "__self__", None) is module else "forward"
    return list(_uses_in_method(module, type(module).__mro__, method, frozenset(), None))


def _uses_in_method(
    module: nn.Module, classes: Sequence[type], method: str, seen: Set[Any], loop: Loop
) -> Iterator[Use]:
    """Yields the uses in a method of the first of some classes that has it."""
    owner = next((each for each in classes if method in vars(each)), nn.Module)
    found: Any = vars(owner).get(method, nn.Module)
    found = found.fget if isinstance(found, property) else found
    function: Any = inspect.unwrap(found)
    if owner is nn.Module or not inspect.isfunction(function) or function in seen:
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):  # no source code, or a lambda inside of an expression
        return
    if isinstance(tree, ast.FunctionDef) and tree.args.args:
        bases = classes[classes.index(owner) + 1 :]
        reader = _Reader(module, bases, tree.args.args[0].arg, seen | {function})
        yield from reader.read_all(tree.body, loop)


class _Reader:
    """Reader of the code of one method, in the order of execution."""

    def __init__(self, module: nn.Module, bases: Sequence[type], own: str, seen: Set[Any]) -> None:
        self._module, self._bases, self._own, self._seen = module, bases, own, seen
        self._aliases: dict[str, Path] = {}  # of local variables

    def read_all(self, nodes: Iterable[ast.AST], loop: Loop) -> Iterator[Use]:
        for node in nodes:
            yield from self._read(node, loop)

    def _read(self, node: ast.AST, loop: Loop) -> Iterator[Use]:
        if isinstance(node, ast.For):
            yield from self._read_loop(node, [(node.target, node.iter)], [*node.body, *node.orelse], loop)
        elif isinstance(node, ast.While):
            yield from self._read_loop(node, [], [node.test, *node.body, *node.orelse], loop)
        elif isinstance(node, _COMPREHENSIONS):
            pairs = [(part.target, part.iter) for part in node.generators]
            conditions = [test for part in node.generators for test in part.ifs]
            results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            outer = dict(self._aliases)
            yield from self._read_loop(node, pairs, [*conditions, *results], loop)
            self._aliases = outer
        elif isinstance(node, ast.Call):
            yield from self._read_call(node, loop)
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
            for target, value in pairs:
                path = self._list_in(value) if self._is_method(self._path(value)) else self._path(value)
                if isinstance(target, ast.Name) and (path := path or self._list_in(value)):
                    self._aliases[target.id] = path
                else:
                    yield from self._read(value, loop)
        elif path := self._path(node):
            yield from self._call(path[:1], loop) if self._is_method(path[:1]) else ()
            yield self._use(path, False, loop)
        else:
            yield from self.read_all(ast.iter_child_nodes(node), loop)

    def _read_loop(
        self, node: ast.AST, pairs: Sequence[tuple[ast.AST, ast.AST]], body: Sequence[ast.AST], outer: Loop
    ) -> Iterator[Use]:
        for target, values in pairs:
            aliases = dict(self._aliases_of(target, values))
            self._aliases.update(aliases)
            if not aliases:
                yield from self._read(values, outer)
        yield from self.read_all(body, node)

    def _aliases_of(self, target: ast.AST, values: ast.AST) -> Iterator[tuple[str, Path]]:
        """Yields the variables of a loop over entries of attributes, such as lists of modules."""
        call = values.func.id if isinstance(values, ast.Call) and isinstance(values.func, ast.Name) else ""
        if isinstance(values, ast.Call) and isinstance(target, ast.Tuple) and call in ("zip", "enumerate"):
            targets = target.elts if call == "zip" else target.elts[1:]
            for pair in zip(targets, values.args, strict=False):
                yield from self._aliases_of(*pair)
            return
        if path := self._list_in(values):
            yield from ((part.id, (*path, _ENTRY)) for part in ast.walk(target) if isinstance(part, ast.Name))

    def _list_in(self, node: ast.AST) -> Path:
        """Returns the path of the list of modules that an expression has entries of, without calling them."""
        lists: set[Path] = set()
        for part in ast.walk(node):
            path = self._path(part.func if isinstance(part, ast.Call) else part)
            if self._is_method(path):  # or a property
                uses = list(self._call(path, None))
                if any(use.is_call for use in uses):
                    return ()
                lists.update(self._list_of((use.name,)) for use in uses)
            elif not isinstance(part, ast.Call):
                lists.add(self._list_of(path))
            elif not _is_builtin(part.func) and path[-1:] not in _VIEWS:
                return ()
        lists.discard(())
        return lists.pop() if len(lists) == 1 else ()

    def _list_of(self, path: Path) -> Path:
        """Returns the part of a path that leads to a list of modules."""
        ends = (path[:length] for length in range(1, len(path) + 1))
        return next((end for end in ends if isinstance(self._module_at(end), _LISTS)), ())

    def _module_at(self, path: Path) -> nn.Module | None:
        module: nn.Module | None = self._module
        for name in path:
            children = {} if module is None else module._modules
            module = next(iter(children.values()), None) if name == _ENTRY else children.get(name)
        return module

    def _read_call(self, node: ast.Call, loop: Loop) -> Iterator[Use]:
        function = node.func
        inspects = _is_builtin(function)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            path = () if inspects else self._path(argument)
            if path and (self._computes(path) or self._is_method(path)):
                yield from self._call(path, loop)
            else:
                yield from self._read(argument, loop)
        if isinstance(function, ast.Attribute) and _is_super(function.value):
            yield from _uses_in_method(self._module, self._bases, function.attr, self._seen, loop)
        elif path := self._path(function):
            yield from self.read_all(_indices(function), loop)
            yield from self._call(path, loop)
        else:
            yield from self._read(function, loop)

    def _call(self, path: Path, loop: Loop) -> Iterator[Use]:
        if self._is_method(path):
            classes = type(self._module).__mro__
            yield from _uses_in_method(self._module, classes, path[0], self._seen, loop)
        else:
            yield self._use(path, self._computes(path), loop)

    def _use(self, path: Path, is_call: bool, loop: Loop) -> Use:
        child = self._module._modules.get(path[0])
        # Each stage would change the buffers of a module that it calls.
        weights = set() if child is None or child._buffers else {*child._parameters}
        reads_weight = not weights.isdisjoint(path[1:2]) and _METADATA.isdisjoint(path[2:3])
        return Use(path[0], is_call, reads_weight, loop)

    def _is_method(self, path: Path) -> bool:
        """Returns whether a path is the name of a method or a property."""
        member = inspect.getattr_static(type(self._module), path[0], None) if len(path) == 1 else None
        return inspect.isfunction(member) or isinstance(member, property)

    def _path(self, node: ast.AST) -> Path:
        """Returns the path of an expression such as `self.layers[0].norm`, or () for other ones."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, ())
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self._own:
                return (node.attr,)
            outer = self._path(node.value)
            return (*outer, node.attr) if outer else ()
        if isinstance(node, ast.Subscript):
            outer = self._path(node.value)
            return (*outer, _ENTRY) if outer else ()
        return ()

    def _computes(self, path: Path) -> bool:
        """Returns whether a path leads to a module, or to a method that the class of a module has added."""
        module = self._module_at(path)
        if module is not None:
            return True
        owner, name = self._module_at(path[:-1]), path[-1]
        method = getattr(type(owner), name, None)
        is_added = inspect.isfunction(method) and method is not getattr(nn.Module, name, None)
        return is_added and not isinstance(owner, _LISTS)


def _is_builtin(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in vars(builtins)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _indices(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the indices in an expression such as `self.layers[i].norm`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Subscript):
            yield node.slice
        node = node.value
