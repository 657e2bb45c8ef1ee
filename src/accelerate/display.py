"""Progress bars and tracebacks on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from accelerate.base import ConfigurationError, is_rich_available, is_tqdm_available, require
from accelerate.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Returns a `tqdm.auto.tqdm` bar that is shown on local rank 0 of each node.

    Args:
        *args: arguments of `tqdm`.
        main_process_only: False shows a bar on each rank.
        **kwargs: keyword arguments of `tqdm`. `disable=True` hides the bar on all ranks.

    Raises:
        MissingPackageError: tqdm is not installed.
        ConfigurationError: the first argument is a bool, which is not iterable.
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
    """Returns `items` after a warning, with a progress bar named `what` where tqdm is installed.

    Both are shown on local rank 0 of each node. `warning` gives the reason why the iteration is slow.
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
    """Installs tracebacks of rich if `ACCELERATE_ENABLE_RICH` is set, and returns whether it did."""
    if not is_rich_available():
        return False
    from rich.traceback import install

    install(show_locals=False)
    return True
