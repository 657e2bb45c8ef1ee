"""What a run shows on the terminal: one progress bar, readable tracebacks."""

from __future__ import annotations

from typing import Any

from accelerate.base.errors import ConfigurationError
from accelerate.base.packages import is_rich_available, require
from accelerate.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a `tqdm.auto.tqdm` bar that is shown on the first process of each machine.

    Args:
        *args: arguments of `tqdm`.
        main_process_only: False shows one bar for each process.
        **kwargs: keywords of `tqdm`; an explicit `disable=True` hides the bar everywhere.

    Raises:
        MissingPackageError: tqdm is not installed.
        ConfigurationError: the first argument is True or False, which is not something to iterate.
    """
    require("tqdm", "A progress bar")
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"tqdm({args[0]}, ...): the first argument is what to iterate over. "
            f"Write main_process_only={args[0]}."
        )
    from tqdm.auto import tqdm as bar

    hidden = main_process_only and not PartialState().is_local_main_process
    kwargs["disable"] = hidden or kwargs.get("disable", False)
    return bar(*args, **kwargs)


def install_rich_tracebacks() -> bool:
    """Show tracebacks through rich where it was asked for (`ACCELERATE_ENABLE_RICH`).

    Returns:
        Whether they are.
    """
    if not is_rich_available():
        return False
    from rich.traceback import install

    install(show_locals=False)
    return True
