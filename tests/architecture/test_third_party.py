"""Only a short list of packages is imported at the top of a file; any other is imported where it is used."""

from __future__ import annotations

import sys
from typing import Any

ALWAYS = {"accelerate", "numpy", "packaging", "psutil", "yaml", "safetensors", "huggingface_hub"}
TORCH_FREE = {"base", "settings", "devices", "launch"}


def allowed_in(source: Any) -> set[str]:
    torch = set() if source.parts[1] in TORCH_FREE else {"torch"}
    return ALWAYS | torch | sys.stdlib_module_names


def test_other_packages_are_imported_where_they_are_used(sources: list[Any]) -> None:
    found = [
        f"{source}:{each.line} imports {each.target}"
        for source in sources
        for each in source.imports
        if not (each.inside_function or each.for_types)
        and each.target.split(".")[0] not in allowed_in(source)
    ]
    assert not found, "\n" + "\n".join(found)
