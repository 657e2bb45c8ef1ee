"""What the tests of the public interface share: the golden lists and how a signature is written in them."""

import inspect
import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
KINDS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def load_golden(name: str) -> Any:
    """Read one golden list."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def describe_default(value: Any) -> str:
    """Write a default so that it is the same everywhere: objects by their type, paths by their file alone."""
    if isinstance(value, str) and value.startswith("/"):
        return f"<a path to {Path(value).name}>"
    plain = isinstance(value, (str, int, float, bool, type(None), tuple, list, dict))
    return repr(value) if plain else f"<{type(value).__name__}>"


def describe(obj: Any) -> str:
    """Write what can be called as its parameters, and anything else as nothing."""
    if not callable(obj):
        return ""
    try:
        parameters = inspect.signature(obj).parameters.values()
    except ValueError:  # built in, without a signature
        return ""
    parts = []
    for parameter in parameters:
        text = KINDS.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            text += f"={describe_default(parameter.default)}"
        parts.append(text)
    return f"({', '.join(parts)})"
