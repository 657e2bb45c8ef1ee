"""Environment variables: read, write, patch and clear. The only module that touches `os.environ`.

Code that decides something takes a `Mapping[str, str]`; `current()` gives it the one of this process.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import methodcaller
from types import FunctionType, MappingProxyType
from typing import Any, Literal, TypeVar, overload

from accelerate.base.errors import wrong_value
from accelerate.base.text import whole_number

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FAILURE_FOLDER = "ACCELERATE_FAILURE_DIR"
"""Variable with the folder in which processes leave what the launcher reads after a failure."""
MONITOR_FOLDER = "ACCELERATE_MONITOR_DIR"
"""Variable with the folder in which ranks write their states; without it there are none."""
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})
UNSAFE_CHARACTERS = frozenset(";\n<> ")
OWN_PREFIX = "ACCELERATE_"

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def current() -> Mapping[str, str]:
    """Return a live, read-only view of this process's variables."""
    return MappingProxyType(os.environ)


def assign(values: Mapping[str, str]) -> None:
    """Set variables of this process, and of the processes it starts from now on."""
    os.environ.update(values)


def unset(*names: str) -> None:
    """Remove variables of this process; those that are not set are left alone."""
    for name in names:
        os.environ.pop(name, None)


@overload
def str_to_bool(value: str, to_bool: Literal[True]) -> bool: ...
@overload
def str_to_bool(value: str, to_bool: bool = False) -> int: ...
def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a yes-or-no word.

    Args:
        value: `y`, `yes`, `t`, `true`, `on`, `1` or `n`, `no`, `f`, `false`, `off`, `0`, in any case.
        to_bool: Return a bool instead of 0 or 1.

    Raises:
        ConfigurationError: If it is another word.
    """
    answer = _is_yes("value", value, "write true or false")
    return answer if to_bool else int(answer)


def get_int_from_env(env_keys: str | Iterable[str], default: int) -> int:
    """Return the first variable that holds a number that is not negative.

    Args:
        env_keys: Names of variables, in the order they are tried; a string is one name.
        default: The answer when none is set; a negative number counts as not set.

    Raises:
        ConfigurationError: If a variable holds something that is not a whole number.
    """
    for key in [env_keys] if isinstance(env_keys, str) else env_keys:
        value = os.environ.get(key, "")
        if not value:
            continue
        try:
            number = whole_number(value)
        except ValueError:
            reason = "not a whole number of at most 64 bits"
            raise wrong_value(key, value, reason, f"correct or unset {key}") from None
        if number >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read a yes-or-no variable; unset and empty mean the default.

    Raises:
        ConfigurationError: If it holds neither a yes nor a no.
    """
    return read_flag(os.environ, key, default)


def read_flag(environ: Mapping[str, str], key: str, default: bool = False) -> bool:
    """Read a yes-or-no variable of a mapping; absent and empty mean the default."""
    value = environ.get(key, "")
    return _is_yes(key, value, f"set {key} to true or false") if value.strip() else default


def _is_yes(name: str, value: str, fix: str) -> bool:
    word = value.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise wrong_value(name, value, "neither a yes nor a no", fix)
    return word in TRUE_WORDS


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable's text, or the default when it is unset."""
    return os.environ.get(key, str(default))


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Write variables as the lines of an environment file, leaving out what a shell would misread.

    Args:
        current_env: Names and values; an empty one, or one with `;`, `<`, `>`, a space or a line break in
            it, is logged and left out.

    Returns:
        One `NAME=value` line with its line break for each pair that is kept.
    """
    import logging  # heavy, and few programs get here

    lines = []
    for key, value in current_env.items():
        if key and value and not UNSAFE_CHARACTERS & set(f"{key}{value}"):
            lines.append(f"{key}={value}\n")
        else:
            logging.getLogger(__name__).warning(
                "Left %s=%r out of the environment: it is empty or has one of ; < > or a space.", key, value
            )
    return lines


@contextmanager
def _restored(is_meant: Callable[[str], bool]) -> Iterator[None]:
    """Give the variables whose names are meant the values back, after the block, that they had before it."""
    saved = {name: value for name, value in os.environ.items() if is_meant(name)}
    try:
        yield
    finally:
        unset(*(name for name in os.environ if is_meant(name) and name not in saved))
        os.environ.update(saved)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment for the block; afterwards it is as before, whatever the block did to it."""
    with _restored(lambda name: True):
        os.environ.clear()
        yield


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables for the block; afterwards they have their old values, also when the block raises.

    Args:
        **kwargs: Names in any case (they are set in upper case) and values (they are set as text).
    """
    wanted = {name.upper(): str(value) for name, value in kwargs.items()}
    with _restored(wanted.__contains__):
        os.environ.update(wanted)
        yield


def _purged(function: Decorated) -> Decorated:
    import inspect  # heavy, and few programs get here

    own = methodcaller("startswith", OWN_PREFIX)
    if not inspect.iscoroutinefunction(function):
        return _restored(own)(function)

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _restored(own):
            return await function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # same call signature, by functools.wraps


def _purge_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if name.startswith("test") and isinstance(member, FunctionType):
            setattr(cls, name, _purged(member))


def purge_accelerate_environment(func_or_cls: Decorated) -> Decorated:
    """Undo, after each call, every change to variables that start with `ACCELERATE_`.

    Args:
        func_or_cls: A function, or a class whose `test*` methods are meant; those of its subclasses too.

    Returns:
        The function wrapped, or the same class with its methods wrapped.
    """
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)
    cls: Any = func_or_cls
    _purge_tests(cls)
    # Read from the class's own dict, so that it can be called with the child and not with the parent.
    inherited = vars(cls).get("__init_subclass__")

    def purge_subclass(child: type, /, **kwargs: Any) -> None:
        if inherited is None:
            super(cls, child).__init_subclass__(**kwargs)
        else:
            inherited.__func__(child, **kwargs)
        _purge_tests(child)

    cls.__init_subclass__ = classmethod(purge_subclass)
    return func_or_cls
