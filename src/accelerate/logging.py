"""Loggers that log on rank 0 by default, instead of on each rank."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from accelerate.base import current, plain_value, wrong_value
from accelerate.state import PartialState, get_cpu_distributed_information, record_event, services

FRAMES_HERE = (
    2  # frames between the caller and the logger of Python, so that the line of the caller is logged
)


if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:  # in Python 3.10 the class is not generic
    _LoggerAdapter = logging.LoggerAdapter


class _Warned(set[tuple[str, str]]):
    """Warnings that `warning_once` has logged in this process, as logger name and text."""


class MultiProcessAdapter(_LoggerAdapter):
    """Logger whose methods have the keyword arguments `main_process_only` and `in_order`.

    `main_process_only` (default True) logs on rank 0 only. With `main_process_only=False` every rank logs, in
    rank order if `in_order=True` (default False), which is then called on every rank. Each message begins
    with `[RANK n] `, the rank that logs it.
    """

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds the rank of this process before a message."""
        text, keywords = super().process(msg, kwargs)
        return f"[RANK {_rank()}] {text}", keywords

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Logs a message on the selected ranks, with keyword arguments of `Logger.log` and of this class.

        Before a `PartialState` or `Accelerator` exists, the rank is that of the environment variables, and
        `in_order` has no effect.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if main_process_only or not in_order or not PartialState._shared_state:
            if not main_process_only or _rank() == 0:
                self._emit(level, msg, args, kwargs)
            return
        state = PartialState()
        # Every rank takes every turn, also one whose level drops the message: the others wait for it.
        for turn in range(state.num_processes):
            if turn == state.process_index:
                self._emit(level, msg, args, kwargs)
            state.wait_for_everyone()

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if level >= logging.WARNING and self.logger.name.startswith("accelerate."):
            record_event("warning", str(msg) % args if args else str(msg))
        if self.isEnabledFor(level):
            text, keywords = self.process(msg, kwargs)
            keywords["stacklevel"] = keywords.get("stacklevel", 1) + FRAMES_HERE
            self.logger.log(level, text, *args, **keywords)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Logs a warning the first time in this process, and ignores the same text afterwards.

        Args:
            msg: the message, with the placeholders of `args`.
            *args: values of the placeholders.
            **kwargs: keyword arguments of `log`.
        """
        key = (self.logger.name, f"{msg} {args!r}")
        warned = services.of_process(_Warned)
        if key in warned:
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.log(logging.WARNING, msg, *args, **kwargs)
        warned.add(key)


def _rank() -> int:
    """Returns the rank of this process, from the environment before there is a state."""
    if state := PartialState._shared_state:
        return int(state["process_index"])
    return get_cpu_distributed_information().rank


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Returns the logger of a module, whose methods accept `main_process_only` and `in_order`.

    Args:
        name: usually `__name__`.
        log_level: level of this logger, such as "INFO". None: `ACCELERATE_LOG_LEVEL`, if set.

    Raises:
        ConfigurationError: there is no such level.
    """
    logger = logging.getLogger(name)
    if log_level:
        logger.setLevel(_known_level("log_level", log_level, AttributeError))
    elif log_level is None and (level := current().get("ACCELERATE_LOG_LEVEL")):
        # Not an `AttributeError`: packages that load their names on first use would report a missing name.
        logger.setLevel(_known_level("ACCELERATE_LOG_LEVEL", level))
    return MultiProcessAdapter(logger, {})


def _known_level(source: str, level: str, *kinds: type[Exception]) -> str:
    name = str(plain_value(level)).upper()
    if not isinstance(logging.getLevelName(name), int):
        levels = "DEBUG, INFO, WARNING, ERROR, CRITICAL"
        raise wrong_value(source, level, "no such level", f"choose one of {levels}", *kinds)
    return name
