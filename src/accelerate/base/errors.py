"""Exceptions that this package raises.

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
    """Base class of the errors that this package raises."""


class ConfigurationError(AccelerateError, ValueError):
    """Error for a flag, file key, environment variable or argument with an invalid value."""


class PreparationError(ConfigurationError):
    """Error for an object passed to `prepare()` that cannot be trained as requested."""


class MissingPackageError(AccelerateError, ModuleNotFoundError):
    """Error for a feature whose optional package is not installed."""


class StateError(AccelerateError, RuntimeError):
    """Error for a call that comes too early, too late, or twice."""


class CheckpointError(AccelerateError, RuntimeError):
    """Error for a checkpoint that is missing, damaged or incomplete, or could not be written."""


class LaunchError(AccelerateError, RuntimeError):
    """Error for processes that could not be started or that failed."""


class RecoveryError(AccelerateError, RuntimeError):
    """Error for a replica group that cannot continue without the others."""


LONGEST = 160
"""Maximum number of characters of a value in a message."""
_END = 40


def shortened(text: str, longest: int = LONGEST) -> str:
    """Returns the text, or its beginning and end where it is long."""
    return text if len(text) <= longest else f"{text[: longest - _END]}...{text[-_END:]}"


def shown(value: object) -> str:
    """Returns the shortened `repr` of a value for a message, or its type where `repr` fails."""
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # an integer with too many digits for Python, or deep nesting
        return f"<{type(value).__name__}>"


def as_builtin(error: ErrorT, *kinds: type[BaseException]) -> ErrorT:
    """Returns an error with the same name and message that is also an instance of other classes."""
    missing = tuple(kind for kind in kinds if not isinstance(error, kind))

    error_type: type[Exception] = type(error)
    return _joined(error_type, missing)(*error.args) if missing else error  # type: ignore[arg-type]


_NOT_MADE_OF_MESSAGE = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
"""Built-in errors whose constructor takes more than a message."""


def like(error: ErrorT, cause: BaseException) -> ErrorT:
    """Returns an error that is also an instance of the built-in classes of its cause."""
    kinds = [
        kind
        for kind in type(cause).__mro__
        if vars(builtins).get(kind.__name__) is kind and kind not in _NOT_MADE_OF_MESSAGE
    ]
    most_derived = [
        kind for kind in kinds if not any(child is not kind and issubclass(child, kind) for child in kinds)
    ]
    return as_builtin(error, *most_derived)


@cache
def _joined(kind: type[Exception], further: tuple[type[BaseException], ...]) -> Any:
    """Returns a subclass whose instances are pickled as an instance of `kind` and the further classes."""

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
    """Returns the error for a wrong value, with its name, the reason and the fix.

    The text is `NAME=VALUE: reason. Fix.` The name is that of a flag, a file key, a variable or an
    argument, as the user wrote it.
    `kinds` are further classes of the error (`as_builtin`).
    """
    fix = fix[:1].upper() + fix[1:]
    text = f"{name}={shown(value)}: {reason.rstrip('.')}. {fix.rstrip('.')}."
    return as_builtin(ConfigurationError(text), *kinds)
