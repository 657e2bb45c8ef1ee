"""Lazy imports of the names that the stub (`.pyi`) of a package or module lists."""

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
    """Returns the `__getattr__`, `__dir__` and `__all__` of a module that imports its names on first use.

    Args:
        module: The module's `__name__`.
        imports: Module -> the names that are imported from it. Default: the imports of the stub beside the
            module, so that type checkers and the interpreter read the same table.
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
                value = getattr(_import(source), attribute) if attribute else _import(source)
        setattr(sys.modules[module], name, value)  # the next lookup does not call this function
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *table})

    return load, list_names, sorted(table)


def _import(module: str) -> ModuleType:
    try:
        return import_module(module)
    except AttributeError as error:  # `from ... import` would report an unknown name and hide it
        raise ImportError(f"{module} cannot be imported: {error}", name=module) from error


def read_table(module: str) -> Iterator[tuple[str, str, str]]:
    """Yields the source module, the name in it, and the exported name of each import in the stub of a module.

    `from package import *` is replaced by the table of that package, without its submodules. `import module`
    has the module itself, and no name in it.
    """
    loaded = import_module(module)
    stub = "__init__" if hasattr(loaded, "__path__") else module.rpartition(".")[2]
    statements = ast.parse(get_data(module, f"{stub}.pyi") or b"").body
    for modules in (node for node in statements if isinstance(node, ast.Import)):
        yield from ((alias.name, "", alias.asname or alias.name) for alias in modules.names)
    for statement in (node for node in statements if isinstance(node, ast.ImportFrom)):
        source = str(statement.module)
        for alias in statement.names:
            if alias.name == "*":
                yield from (row for row in read_table(source) if row[0] != source)
            else:
                yield source, alias.name, alias.asname or alias.name


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables the garbage collector while modules are imported, which create many objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
