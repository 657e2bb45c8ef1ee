"""The errors this package raises.

```
AccelerateError
├── ConfigurationError (ValueError)      a wrong flag, key, variable or argument
│   └── PreparationError                 an object given to prepare() that cannot work
├── MissingPackageError (ImportError)    an optional package is needed
├── StateError (RuntimeError)            called too early, too late, or twice
├── CheckpointError (RuntimeError)       a checkpoint is missing, broken, or could not be written
└── LaunchError (RuntimeError)           processes could not be started or failed
```

Each also derives from the built-in exception that callers of such a function expect, so that
`except ValueError` keeps working.
"""


class AccelerateError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(AccelerateError, ValueError):
    """A flag, file key, environment variable or argument has a value that cannot work."""


class PreparationError(ConfigurationError):
    """An object given to `prepare()` cannot be trained the way it was asked for."""


class MissingPackageError(AccelerateError, ImportError):
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


def wrong_value(name: str, value: object, reason: str, mend: str) -> ConfigurationError:
    """Build the error for one wrong value; the caller raises it.

    Args:
        name: What holds the value, as the user wrote it: a flag, a file key, a variable, an argument.
        value: The value found; a long one is shortened.
        reason: Why it cannot work, without a full stop.
        mend: What to do instead, without a full stop.

    Returns:
        A `ConfigurationError` whose text is `NAME=VALUE: reason. Mend.`
    """
    mend = mend[:1].upper() + mend[1:]
    return ConfigurationError(f"{name}={shown(value)}: {reason.rstrip('.')}. {mend.rstrip('.')}.")
