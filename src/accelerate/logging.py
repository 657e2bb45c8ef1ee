"""Logging that knows which process it is in: one line for the run instead of one for each process."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from accelerate.base import StateError, current, wrong_value
from accelerate.state import PartialState, note_event, services

FRAMES_HERE = 2  # between the caller and Python's logger: the line that is logged is the caller's


if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 has no parameter for it
    _LoggerAdapter = logging.LoggerAdapter


class _Warned(set[tuple[str, str]]):
    """The warnings that `warning_once` has logged in this process: name of the logger, and text."""


class MultiProcessAdapter(_LoggerAdapter):
    """A logger whose calls take two more keywords.

    `main_process_only` (default True) logs on the first process only. With `main_process_only=False` every
    process logs, in rank order when `in_order=True` (default False); then the call is made on every rank.
    Each message begins with `[RANK n] `, the rank that logs it.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank of this process in front of a message."""
        text, keywords = super().process(msg, kwargs)
        return f"[RANK {PartialState().process_index}] {text}", keywords

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message on the processes that are meant, with keywords of `Logger.log` and of this class.

        Raises:
            StateError: no state was made yet, so the process does not know its rank.
        """
        if not PartialState._shared_state:
            raise StateError(
                f"Cannot log {msg!r}: this process does not know yet which one it is. Build a "
                "`PartialState()` or an `Accelerator()` before you log, or use Python's own `logging`."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        state = PartialState()
        if main_process_only or not in_order:
            if state.is_main_process or not main_process_only:
                self._emit(level, msg, args, kwargs)
            return
        # Every rank takes every turn, also one whose level drops the message: the others wait for it.
        for turn in range(state.num_processes):
            if turn == state.process_index:
                self._emit(level, msg, args, kwargs)
            state.wait_for_everyone()

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if level >= logging.WARNING and self.logger.name.startswith("accelerate."):
            note_event("warning", str(msg) % args if args else str(msg))
        if self.isEnabledFor(level):
            text, keywords = self.process(msg, kwargs)
            keywords["stacklevel"] = keywords.get("stacklevel", 1) + FRAMES_HERE
            self.logger.log(level, text, *args, **keywords)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning the first time it is given in this process; the same text is left out afterwards.

        Args:
            msg: the message, with the placeholders of `args`.
            *args: what its placeholders stand for.
            **kwargs: keywords of `log`.
        """
        key = (self.logger.name, f"{msg} {args!r}")
        warned = services.of_process(_Warned)
        if key in warned:
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.log(logging.WARNING, msg, *args, **kwargs)
        warned.add(key)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger of a module, with `main_process_only` and `in_order` in each of its calls.

    Args:
        name: usually `__name__`.
        log_level: level of this logger, such as "INFO"; None takes `ACCELERATE_LOG_LEVEL`, if it is set.

    Raises:
        ConfigurationError: there is no such level.
    """
    logger = logging.getLogger(name)
    source, level = "log_level", log_level
    if level is None:
        source, level = "ACCELERATE_LOG_LEVEL", current().get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(_known_level(source, level))
    return MultiProcessAdapter(logger, {})


def _known_level(source: str, level: str) -> str:
    name = str(level).upper()
    if not isinstance(logging.getLevelName(name), int):
        levels = "DEBUG, INFO, WARNING, ERROR, CRITICAL"
        raise wrong_value(source, level, "no such level", f"choose one of {levels}", AttributeError)
    return name
