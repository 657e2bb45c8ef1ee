"""Access to environment variables, and the only module that touches `os.environ`.

Functions that make a decision take a `Mapping[str, str]`. `current()` returns that of this process.
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
"""Variable with the folder in which processes record the failures that the launcher reports."""
REPLICA = "ACCELERATE_REPLICA"
"""Variable with the index of a replica group, in the launcher of its processes and in these."""
ELASTIC = "ACCELERATE_ELASTIC"
"""Variable that is set in the processes of a run whose number of machines may change."""
RUN_ID = "ACCELERATE_RUN_ID"
"""Variable with the identifier of a launch, which is part of the name of the folder of its records."""
PARENT = "ACCELERATE_PARENT"
"""Variable with the process id of a launcher, in the processes that it starts and that end with it."""
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})
_LAUNCH_VARIABLES = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MIXED_PRECISION",
        "JOB_COMPLETION_INDEX",
        "TORCH_FR_DUMP_TEMP_FILE",
        "NCCL_DEBUG_FILE",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEPID",
    ]
)
_LAUNCH_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "MEGATRON_LM_",
    "PARALLELISM_CONFIG_",
    "TORCHELASTIC_",
    "TORCH_ELASTIC_",
    "PET_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    "SMDATAPARALLEL_",
    "SLURM_STEP_",
)
_NOT_OF_THE_LAUNCH = frozenset(
    [
        "ACCELERATE_USE_CPU",
        "ACCELERATE_USE_XPU",
        "ACCELERATE_USE_IPEX",
        "ACCELERATE_TORCH_DEVICE",
        "ACCELERATE_LOG_LEVEL",
        "ACCELERATE_ENABLE_RICH",
        "ACCELERATE_INIT_INCLUDE_BUFFERS",
    ]
)
"""Variables with a prefix of the launch that name hardware, or how a program is to behave."""
UNSAFE_CHARACTERS = frozenset(";\n<> ")
ACCELERATE_PREFIX = "ACCELERATE_"

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def current() -> Mapping[str, str]:
    """Returns a live, read-only view of the variables of this process."""
    return MappingProxyType(os.environ)


def assign(values: Mapping[str, str]) -> None:
    """Sets variables of this process and of the processes that it starts from now on."""
    os.environ.update(values)


def take_parent() -> int | None:
    """Removes the variable with the process id of the launcher of this process, and returns its value."""
    value = os.environ.pop(PARENT, None)
    return None if value is None else int(value)


def unset(*names: str) -> None:
    """Removes variables of this process and ignores those that are not set."""
    for name in names:
        os.environ.pop(name, None)


@overload
def str_to_bool(value: str, to_bool: Literal[True]) -> bool: ...
@overload
def str_to_bool(value: str, to_bool: bool = False) -> int: ...
def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Converts a yes-or-no word to a boolean.

    Args:
        value: `y`, `yes`, `t`, `true`, `on`, `1` or `n`, `no`, `f`, `false`, `off`, `0`, in any case.
        to_bool: Return a bool instead of 0 or 1.

    Raises:
        ConfigurationError: If it is another word.
    """
    answer = _is_yes("value", value, "write true or false")
    return answer if to_bool else int(answer)


def get_int_from_env(env_keys: str | Iterable[str], default: int) -> int:
    """Returns the value of the first variable that holds a non-negative number.

    Args:
        env_keys: Names of variables in the order they are tried. A string is one name.
        default: The result when none is set. A negative number counts as not set.

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
    """Returns the value of a yes-or-no variable, or the default when it is unset or empty.

    Raises:
        ConfigurationError: If it holds neither a yes nor a no.
    """
    return read_flag(os.environ, key, default)


def read_flag(environ: Mapping[str, str], key: str, default: bool = False) -> bool:
    """Returns the value of a yes-or-no variable of a mapping, or the default when it is absent or empty."""
    value = environ.get(key, "")
    return _is_yes(key, value, f"set {key} to true or false") if value.strip() else default


def _is_yes(name: str, value: str, fix: str) -> bool:
    word = value.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise wrong_value(name, value, "neither a yes nor a no", fix)
    return word in TRUE_WORDS


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Returns the text of a variable, or the default when it is unset."""
    return os.environ.get(key, str(default))


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Returns variables as the lines of an environment file, without those that a shell would misread.

    Args:
        current_env: Names and values. An empty one, or one that contains `;`, `<`, `>`, a space or a line
            break, is logged and left out.

    Returns:
        One `NAME=value` line with its line break for each pair that is kept.
    """
    import logging  # slow to import, and few programs call this function

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
def _restored(is_selected: Callable[[str], bool]) -> Iterator[None]:
    """Restores the variables with selected names to their previous values after the block."""
    saved = {name: value for name, value in os.environ.items() if is_selected(name)}
    try:
        yield
    finally:
        unset(*(name for name in os.environ if is_selected(name) and name not in saved))
        os.environ.update(saved)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empties the environment for the block and restores it afterwards."""
    with _restored(lambda name: True):
        os.environ.clear()
        yield


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Sets variables for the block and restores their old values afterwards, also when the block raises.

    Args:
        **kwargs: Names in any case, which are set in upper case, and values, which are set as text.
    """
    values = {name.upper(): str(value) for name, value in kwargs.items()}
    with _restored(values.__contains__):
        os.environ.update(values)
        yield


def _is_of_launch(name: str) -> bool:
    if name in _NOT_OF_THE_LAUNCH:
        return False
    return name in _LAUNCH_VARIABLES or name.startswith(_LAUNCH_PREFIXES)


@contextmanager
def detached_environment() -> Iterator[dict[str, str]]:
    """Removes the variables of a distributed launch inside the block, so that child processes do not join it.

    A child process started inside the block, by `subprocess` or by `multiprocessing` with the start method
    "spawn", is a single process: it can create an `Accelerator`, or launch a run. The variables are those of
    the ranks and of the rendezvous, as `accelerate launch`, torchrun, MPI and srun set them, and the settings
    of the launch. Variables that select the device remain. The environment of the whole process changes, so
    no other thread may start ranks inside the block.

    Yields:
        A copy of the environment without these variables, for the argument `env` of `subprocess`; it can
        be used after the block too.
    """
    with _restored(_is_of_launch):
        unset(*filter(_is_of_launch, list(os.environ)))
        yield dict(os.environ)


def _purged(function: Decorated) -> Decorated:

    import inspect  # slow to import, and few programs call this function

    has_prefix = methodcaller("startswith", ACCELERATE_PREFIX)
    if not inspect.iscoroutinefunction(function):
        return _restored(has_prefix)(function)

    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _restored(has_prefix):
            return await function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # same call signature, by functools.wraps


def _purge_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if name.startswith("test") and isinstance(member, FunctionType):
            setattr(cls, name, _purged(member))


def purge_accelerate_environment(func_or_cls: Decorated) -> Decorated:
    """Undoes every change to variables that start with `ACCELERATE_` after each call.

    Args:
        func_or_cls: A function, or a class. Of a class and its subclasses, the `test*` methods are wrapped.

    Returns:
        The function wrapped, or the same class with its methods wrapped.
    """
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)
    cls: Any = func_or_cls
    _purge_tests(cls)
    # Read from the dict of the class, so that it is called with the child and not with the parent.
    inherited = vars(cls).get("__init_subclass__")

    def purge_subclass(child: type, /, **kwargs: Any) -> None:
        if inherited is None:
            super(cls, child).__init_subclass__(**kwargs)
        else:
            inherited.__func__(child, **kwargs)
        _purge_tests(child)

    cls.__init_subclass__ = classmethod(purge_subclass)
    return func_or_cls
