"""The errors this package raises.

```
AccelerateError
├── ConfigurationError (ValueError)      a wrong flag, key, variable or argument
│   └── PreparationError                 an object given to prepare() that cannot work
├── MissingPackageError (ModuleNotFoundError)    an optional package is needed
├── StateError (RuntimeError)            called too early, too late, or twice
├── CheckpointError (RuntimeError)       a checkpoint is missing, broken, or could not be written
└── LaunchError (RuntimeError)           processes could not be started or failed
```

Each also derives from the built-in exception that callers of such a function expect, so that
`except ValueError` keeps working. Where callers expect another one, `as_builtin` makes the error an instance
of that class too.
"""

from __future__ import annotations

import builtins
from functools import cache
from typing import Any, TypeVar

ErrorT = TypeVar("ErrorT", bound=Exception)


class AccelerateError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(AccelerateError, ValueError):
    """A flag, file key, environment variable or argument has a value that cannot work."""


class PreparationError(ConfigurationError):
    """An object given to `prepare()` cannot be trained the way it was asked for."""


class MissingPackageError(AccelerateError, ModuleNotFoundError):
    """A feature needs an optional package that is not installed."""


class StateError(AccelerateError, RuntimeError):
    """Something was called too early, too late, or twice."""


class CheckpointError(AccelerateError, RuntimeError):
    """A checkpoint, or a file of one, is missing, damaged, incomplete, or could not be written."""


class LaunchError(AccelerateError, RuntimeError):
    """Processes could not be started, or failed once started."""


LONGEST = 160
"""Characters of a value that a message shows."""
_END = 40


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return text for a message: as it is, or its beginning and its end where it is long."""
    return text if len(text) <= longest else f"{text[: longest - _END]}...{text[-_END:]}"


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, shortened; of values that have none, the type."""
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or nesting
        return f"<{type(value).__name__}>"


def as_builtin(error: ErrorT, *kinds: type[BaseException]) -> ErrorT:
    """Return an error of the same name and message that is an instance of further classes, to be raised."""
    missing = tuple(kind for kind in kinds if not isinstance(error, kind))
    own: type[Exception] = type(error)
    return _joined(own, missing)(*error.args) if missing else error  # type: ignore[arg-type]


_NOT_OF_A_MESSAGE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
"""Built-in errors that are not made of a message alone; `UnicodeError`, their base, is."""


def like(error: ErrorT, cause: BaseException) -> ErrorT:
    """Return an error that is an instance of the built-in classes of its cause too, to be raised."""
    kinds = [
        kind
        for kind in type(cause).__mro__
        if vars(builtins).get(kind.__name__) is kind and kind not in _NOT_OF_A_MESSAGE
    ]
    narrow = [
        kind for kind in kinds if not any(child is not kind and issubclass(child, kind) for child in kinds)
    ]
    return as_builtin(error, *narrow)


@cache
def _joined(kind: type[Exception], further: tuple[type[BaseException], ...]) -> Any:
    """Return a subclass; an instance is pickled as one of its parent, and its other parents."""

    def reduce(self: Exception) -> tuple[Any, ...]:
        return as_builtin, (kind(*self.args), *further)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": BaseException.__str__,
        "__reduce__": reduce,
    }
    return type(kind.__name__, (kind, *further), namespace)


def wrong_value(
    name: str, value: object, reason: str, fix: str, *kinds: type[BaseException]
) -> ConfigurationError:
    """Return the error `NAME=VALUE: reason. Fix.` for one wrong value, to be raised; see `as_builtin`.

    The name is that of a flag, a file key, a variable or an argument, as the user wrote it.
    """
    fix = fix[:1].upper() + fix[1:]
    text = f"{name}={shown(value)}: {reason.rstrip('.')}. {fix.rstrip('.')}."
    return as_builtin(ConfigurationError(text), *kinds)
