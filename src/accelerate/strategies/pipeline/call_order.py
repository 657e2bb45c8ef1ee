"""Order in which the code of a forward calls the modules of its module."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from accelerate.strategies.pipeline.plain_values import value_of

_ENTRY, _ENTRY_OF_REVERSED = "[]", "[::-1]"
"""Names of an entry of a list in a path, of which the second is that of a loop from the last to the first."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_VIEWS = (("values",), ("items",), ("children",))
_METADATA = frozenset({"device", "dim", "dtype", "ndim", "numel", "requires_grad", "shape", "size"})
"""Attributes of tensors that do not depend on their values."""
Loop = tuple[Any, ...] | None
"""A loop, the index of the list that it goes through, of several in turn, and the loop around it."""
Path = tuple[str, ...]
"""Names of attributes, such as `("layers", "[]", "norm")` for `self.layers[0].norm`."""


class Use(NamedTuple):
    """Use of an attribute of a module in the code of its forward.

    Attributes:
        is_call: Whether a module is called or passed to a function, and not only read.
        reads_weight: Whether the values of a parameter of the module are used, which has no buffers.
        is_reversed: Whether the entries of a list are used from the last to the first.
        entry: Name of the entry of a list, or "" if it is not known.
        loop: The innermost loop around the use, or None.
    """

    name: str
    is_call: bool
    reads_weight: bool
    is_reversed: bool
    entry: str
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
        self._joined: dict[str, list[Path]] = {}  # local variables with the entries of several lists
        self._descending: set[str] = set()  # local variables with indices from the last to the first
        self._values: dict[str, Any] = {}  # of local variables with numbers and names

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
                self._set_values(target, self._value(value))
                path = () if self._is_method(self._path(value)) else self._path(value)
                entries = [] if path else self._entries_in(value)
                if isinstance(target, ast.Name) and (path or [each[-1] for each in entries] == [_ENTRY]):
                    self._aliases[target.id] = path or entries[0][:-1]
                elif isinstance(target, ast.Name) and entries:
                    self._joined[target.id] = entries
                else:
                    yield from self._read(value, loop)
        elif isinstance(node, ast.AugAssign):
            self._set_values(node.target, None)
            yield from self._read(node.value, loop)
        elif path := self._path(node):
            yield from self._call(path[:1], loop) if self._is_method(path[:1]) else ()
            yield self._use(path, False, loop)
        else:
            yield from self.read_all(ast.iter_child_nodes(node), loop)

    def _read_loop(
        self, node: ast.AST, pairs: Sequence[tuple[ast.AST, ast.AST]], body: Sequence[ast.AST], outer: Loop
    ) -> Iterator[Use]:
        aliases: dict[str, list[Path]] = {}
        entries = self._value(pairs[0][1]) if len(pairs) == 1 else None
        entries = entries if isinstance(entries, list) else []
        for target, values in pairs:
            self._set_values(target, None)
            found = dict(self._aliases_of(target, values))
            aliases.update(found)
            if not found:
                yield from self._read(values, outer)
            if isinstance(target, ast.Name) and _is_descending(values):
                self._descending.add(target.id)
        for index in range(max([1, len(entries), *map(len, aliases.values())])):
            if entries:
                self._set_values(pairs[0][0], entries[min(index, len(entries) - 1)])
            self._aliases |= {name: paths[min(index, len(paths) - 1)] for name, paths in aliases.items()}
            yield from self.read_all(body, (node, index, outer))

    def _value(self, node: ast.AST) -> Any:
        """Returns the number, text or list of those that an expression has, or None."""
        return value_of(node, self._module, self._own, self._values)

    def _set_values(self, target: ast.AST, value: Any) -> None:
        """Sets the values of the local variables in a target, which are not known if the value is None."""
        if isinstance(target, ast.Name) and value is not None:
            self._values[target.id] = value
        elif isinstance(target, ast.Name):
            self._values.pop(target.id, None)
        elif isinstance(target, (ast.Tuple, ast.List)):
            count = len(target.elts)
            is_pair = isinstance(value, (list, tuple)) and len(value) == count
            for part, each in zip(target.elts, value if is_pair else [None] * count, strict=True):
                self._set_values(part, each)

    def _aliases_of(self, target: ast.AST, values: ast.AST) -> Iterator[tuple[str, list[Path]]]:
        """Yields the variables of a loop over entries of attributes, such as lists of modules."""
        call = values.func.id if isinstance(values, ast.Call) and isinstance(values.func, ast.Name) else ""
        if isinstance(values, ast.Call) and isinstance(target, ast.Tuple) and call in ("zip", "enumerate"):
            targets = target.elts if call == "zip" else target.elts[1:]
            for pair in zip(targets, values.args, strict=False):
                yield from self._aliases_of(*pair)
            return
        if entries := self._entries_in(values):
            yield from ((part.id, entries) for part in ast.walk(target) if isinstance(part, ast.Name))

    def _entries_in(self, node: ast.AST, is_reversed: bool = False) -> list[Path]:
        """Returns the paths of the entries that a loop over an expression goes through, in their order."""
        if isinstance(node, ast.Name) and node.id in self._joined:
            return self._joined[node.id][:: -1 if is_reversed else 1]
        if inner := _reversed_in(node):
            return self._entries_in(inner, not is_reversed)
        parts = _joined_in(node)
        if not parts:
            path = self._list_in(node)
            entry = _ENTRY_OF_REVERSED if is_reversed else _ENTRY
            return [(*path, entry)] if path else [(name,) for name in self._names_of(self._path(node))]
        entries = [
            [path] if (path := self._path(part)) and not is_list else self._entries_in(part, is_reversed)
            for part, is_list in parts
        ]
        if not all(entries):
            return []
        return [path for paths in entries[:: -1 if is_reversed else 1] for path in paths]

    def _names_of(self, path: Path) -> list[str]:
        """Returns the names of modules in an attribute that is a list of names."""
        value = vars(self._module).get(path[0]) if len(path) == 1 else None
        names = value if isinstance(value, (list, tuple)) else []
        return [name for name in names if isinstance(name, str) and name in self._module._modules]

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
        longest = max(lists, key=len, default=())
        return longest if all(each == longest[: len(each)] for each in lists) else ()

    def _list_of(self, path: Path) -> Path:
        """Returns the part of a path that leads to a list of modules, and to no unknown entry of it."""
        known = next((i for i, name in enumerate(path) if name in (_ENTRY, _ENTRY_OF_REVERSED)), len(path))
        ends = (path[:length] for length in range(known, 0, -1))
        return next((end for end in ends if isinstance(self._module_at(end), _LISTS)), ())

    def _module_at(self, path: Path) -> nn.Module | None:
        module: nn.Module | None = self._module
        for name in path:
            children = {} if module is None else module._modules
            is_entry = name in (_ENTRY, _ENTRY_OF_REVERSED)
            module = next(iter(children.values()), None) if is_entry else children.get(name)
        return module

    def _read_call(self, node: ast.Call, loop: Loop) -> Iterator[Use]:
        function = node.func
        inspects = _is_builtin(function)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        paths = [() if inspects else self._path(argument) for argument in arguments]
        called = [path for path in paths if path and (self._computes(path) or self._is_method(path))]
        # The function calls modules after all arguments are computed.
        yield from self.read_all(
            [each for each, path in zip(arguments, paths, strict=True) if path not in called], loop
        )
        for path in called:
            yield from self._call(path, loop)
        for name in self._matching(node):
            yield self._use((name,), True, loop)
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
        is_entry = isinstance(child, _LISTS) and path[1:2] and path[1] in child._modules
        entry = path[1] if is_entry else ""
        return Use(path[0], is_call, reads_weight, _ENTRY_OF_REVERSED in path, entry, loop)

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
            outer, index = self._path(node.value), node.slice
            if outer and (entry := self._entry_at(outer, index)):
                return (*outer, entry)
            is_reversed = isinstance(index, ast.Name) and index.id in self._descending
            return (*outer, _ENTRY_OF_REVERSED if is_reversed else _ENTRY) if outer else ()
        if isinstance(node, ast.Call) and _is_call_of("next", node):
            outer = self._path(node.args[0])
            return (*outer, _ENTRY) if outer else ()
        name = self._attribute_name(node)
        known = None if name is None else self._value(name)
        if isinstance(known, str) and known in self._module._modules:
            return (known,)
        return self._aliases.get(name.id, ()) if isinstance(name, ast.Name) else ()

    def _entry_at(self, path: Path, index: ast.AST) -> str:
        """Returns the name of the entry of a list of modules at a known index, or an empty string."""
        found, value = self._module_at(path), self._value(index)
        if not isinstance(found, _LISTS) or isinstance(value, list) or value is None:
            return ""
        if isinstance(value, int) and value < 0:
            value += len(found)
        return str(value) if str(value) in found._modules else ""

    def _attribute_name(self, node: ast.AST) -> ast.AST | None:
        """Returns the name in `getattr(self, name)`, or None for other expressions."""
        if not (isinstance(node, ast.Call) and _is_call_of("getattr", node)):
            return None
        is_own = isinstance(node.args[0], ast.Name) and node.args[0].id == self._own
        return node.args[1] if is_own else None

    def _matching(self, node: ast.AST) -> list[str]:
        """Returns the names of the modules that `getattr(self, f"layer{i}")` returns."""
        name = self._attribute_name(node)
        parts = name.values if isinstance(name, ast.JoinedStr) else []
        pattern = "".join(
            re.escape(ast.literal_eval(p)) if isinstance(p, ast.Constant) else ".+" for p in parts
        )
        return [child for child in self._module._modules if re.fullmatch(pattern, child)]

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


def _is_call_of(name: str, node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name


def _reversed_in(node: ast.AST) -> ast.AST | None:
    """Returns the list in `reversed(a)` or `a[::-1]`, or None for other expressions."""
    if isinstance(node, ast.Call) and _is_call_of("reversed", node):
        return node.args[0]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return node.value if _is_negative(node.slice.step) else None
    return None


def _joined_in(node: ast.AST) -> list[tuple[ast.AST, bool]]:
    """Returns the parts of `[a, *b]`, `a + b` or `a if c else b`, and whether each is a list."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [(part.value, True) if isinstance(part, ast.Starred) else (part, False) for part in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [(node.left, True), (node.right, True)]
    return [(node.body, True), (node.orelse, True)] if isinstance(node, ast.IfExp) else []


def _is_descending(node: ast.AST) -> bool:
    """Returns whether an expression is a range from the last to the first index."""
    if isinstance(inner := _reversed_in(node), ast.Call):
        return _is_call_of("range", inner) and not _is_descending(inner)
    if isinstance(node, ast.Call) and _is_call_of("range", node):
        return len(node.args) == 3 and _is_negative(node.args[2])
    return False


def _is_negative(node: ast.AST | None) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _indices(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the indices in an expression such as `self.layers[i].norm`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Subscript):
            yield node.slice
        node = node.value
