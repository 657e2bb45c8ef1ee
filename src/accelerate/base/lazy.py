"""Load names on first use: those of a package or module from its one table, the stub (`.pyi`) beside it."""

import ast
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pkgutil import get_data
from types import ModuleType
from typing import Any


def attach(
    module: str, imports: Mapping[str, Iterable[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a module's `__getattr__` and `__dir__`, which load names on first use, and its `__all__`.

    Args:
        module: The module's `__name__`.
        imports: Module -> the names that are imported from it. Default: what the stub beside the module
            imports, so that type checkers and the interpreter read the same table.
    """
    if imports is None:
        table = {name: (source, attribute) for source, attribute, name in read_table(module)}
    else:
        table = {name: (source, name) for source, names in imports.items() for name in names}

    def load(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source, attribute = table[name]
        with without_collection():
            if source == module:  # a submodule of this package
                value: Any = _import(f"{module}.{attribute}")
            else:
                value = getattr(_import(source), attribute)
        setattr(sys.modules[module], name, value)  # the next look-up finds it without coming here
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *table})

    return load, list_names, sorted(table)


def _import(module: str) -> ModuleType:
    try:
        return import_module(module)
    except AttributeError as error:  # `from ... import` takes it for an unknown name, and hides it
        raise ImportError(f"{module} cannot be imported: {error}", name=module) from error


def read_table(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield the source, the name in it, and the name in the module, of each import in a module's stub.

    `from package import *` is replaced by the table of that package, without its submodules.
    """
    loaded = import_module(module)
    stub = "__init__" if hasattr(loaded, "__path__") else module.rpartition(".")[2]
    statements = ast.parse(get_data(module, f"{stub}.pyi") or b"").body
    for statement in (node for node in statements if isinstance(node, ast.ImportFrom)):
        source = str(statement.module)
        for alias in statement.names:
            if alias.name == "*":
                yield from (row for row in read_table(source) if row[0] != source)
            else:
                yield source, alias.name, alias.asname or alias.name


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from walking over all of torch's objects while modules are imported."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
