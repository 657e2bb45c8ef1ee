"""What a run shows on the terminal: one progress bar, readable tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from accelerate.base import ConfigurationError, is_rich_available, is_tqdm_available, require
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


def track(items: Iterable[Any], what: str, warning: str) -> Iterable[Any]:
    """Return `items` with a warning, why it takes long, and where tqdm is installed a bar named `what`.

    Both are shown on the first process of each machine.
    """
    if PartialState._shared_state and not PartialState().is_local_main_process:
        return items
    logging.getLogger(__name__).warning(warning)
    if not is_tqdm_available():
        return items
    from tqdm.auto import tqdm as bar

    shown: Iterable[Any] = bar(items, desc=what, delay=1.0)
    return shown


def install_rich_tracebacks() -> bool:
    """Show tracebacks through rich where `ACCELERATE_ENABLE_RICH` asks for it; return whether they are."""
    if not is_rich_available():
        return False
    from rich.traceback import install

    install(show_locals=False)
    return True
