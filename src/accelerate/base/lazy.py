"""Load a package's public names on first use, from its one table."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build what a package's `__init__.py` needs to load its names on first use.

    Args:
        package: The package's `__name__`.
        table: Public name -> the module that holds it; a name whose module is `package.name` is that
            module itself.

    Returns:
        The functions for the package's `__getattr__` and `__dir__`, and the list for its `__all__`.
    """

    def load(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(table[name])
        value = module if table[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next look-up finds it without coming here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *table})

    return load, names, sorted(table)
