"""Logging by process: who logs, with which level, naming whose line."""

from __future__ import annotations

import logging
import sys
import uuid
from typing import Any

import pytest

from accelerate.base import ConfigurationError, patch_environment
from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.state import PartialState, process_group

pytestmark = pytest.mark.usefixtures("states")


@pytest.fixture
def logger() -> MultiProcessAdapter:
    """A logger of its own for each test: what was said once stays said."""
    PartialState(cpu=True)
    return get_logger(f"test.{uuid.uuid4()}", "DEBUG")


def become(rank: int, size: int = 2) -> None:
    PartialState._shared_state.update(process_index=rank, num_processes=size)


@pytest.mark.parametrize(("rank", "keywords"), [(0, {}), (1, {}), (1, {"main_process_only": False})])
def test_without_a_state_the_rank_is_that_of_the_environment(
    caplog: pytest.LogCaptureFixture, rank: int, keywords: dict[str, Any]
) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    with patch_environment(RANK=rank, WORLD_SIZE=2, **variables):
        get_logger("test.early").warning("hello", **keywords)
        get_logger("test.early").warning("in order", in_order=True, **keywords)
    texts = [record.getMessage() for record in caplog.records]
    is_logged = rank == 0 or bool(keywords)
    assert texts == ([f"[RANK {rank}] hello", f"[RANK {rank}] in order"] if is_logged else [])
    assert not PartialState._shared_state


def test_a_single_process_logs_without_a_state(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("test.early").warning("hello")
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] hello"]
    assert not PartialState._shared_state


@pytest.mark.parametrize(
    ("rank", "keywords", "logs"),
    [
        (0, {}, True),
        (1, {}, False),
        (1, {"in_order": True}, False),
        (1, {"main_process_only": False}, True),
        (0, {"main_process_only": True}, True),
    ],
)
def test_loggers_write_on_the_chosen_ranks(
    logger: MultiProcessAdapter,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    keywords: dict[str, Any],
    logs: bool,
) -> None:
    become(rank)
    logger.info("step %d", 3, **keywords)
    assert [record.getMessage() for record in caplog.records] == ([f"[RANK {rank}] step 3"] if logs else [])


def test_every_method_takes_the_keywords(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    become(1)
    for method in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, method)("message", main_process_only=False)
    try:
        raise LookupError("lost")
    except LookupError:
        logger.exception("caught", main_process_only=False)
    assert [record.levelname for record in caplog.records] == [
        "DEBUG",
        "INFO",
        "WARNING",
        "ERROR",
        "CRITICAL",
        "ERROR",
    ]
    assert "LookupError: lost" in caplog.text


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("level", ["INFO", "ERROR"])
def test_in_order_ranks_log_one_after_the_other(
    logger: MultiProcessAdapter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    level: str,
) -> None:
    become(rank, 3)
    turns: list[int] = []
    monkeypatch.setattr(process_group, "wait", lambda device: turns.append(len(caplog.records)))
    logger.setLevel(level)
    logger.info("mine", main_process_only=False, in_order=True)
    logged = int(level == "INFO")
    assert turns == [logged if turn >= rank else 0 for turn in range(3)]


def test_log_records_have_the_line_of_the_caller(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    def wrapper() -> None:
        if sys.version_info < (3, 11):  # it counts the frames of the module logging
            logger.log(logging.INFO, "inner", stacklevel=2)
        else:
            logger.info("inner", stacklevel=2)

    logger.info("method")
    logger.log(logging.INFO, "log")
    logger.warning_once("once")
    wrapper()
    logger.info("in turn", main_process_only=False, in_order=True)
    names = {(record.filename, record.funcName) for record in caplog.records}
    assert len(caplog.records) == 5
    assert names == {("test_logging.py", "test_log_records_have_the_line_of_the_caller")}


def test_warning_once_logs_each_text_once(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    other = get_logger(f"{logger.name}.other")
    for _ in range(3):
        logger.warning_once("slow")
        logger.warning_once("slow by %d", 2)
        logger.warning_once("slow by %d", 3)
        logger.warning_once("unhashable %s", [1])
        other.warning_once("slow")
    assert sorted(record.getMessage() for record in caplog.records) == [
        "[RANK 0] slow",
        "[RANK 0] slow",
        "[RANK 0] slow by 2",
        "[RANK 0] slow by 3",
        "[RANK 0] unhashable [1]",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_messages_of_any_type_begin_with_the_rank(
    logger: MultiProcessAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    become(1, 2)
    logger.info(ValueError("lost"), main_process_only=False)
    logger.info("100%", main_process_only=False)
    logger.info("%d%%", 3, main_process_only=False)
    assert caplog.messages == ["[RANK 1] lost", "[RANK 1] 100%", "[RANK 1] 3%"]


def test_the_level_is_that_of_the_argument_or_the_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    PartialState(cpu=True)
    assert get_logger("test.level.given", "info").logger.level == logging.INFO
    assert get_logger("test.level.given").logger.level == logging.INFO, "it is left as it is"
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("test.level.variable").logger.level == logging.ERROR
    assert get_logger("test.level.both", log_level="DEBUG").logger.level == logging.DEBUG
    assert logging.getLogger().level == logging.WARNING
    get_logger("test.level.variable").warning("left out")
    assert caplog.records == []


def test_an_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="log_level='LOUD': no such level"):
        get_logger("test.unknown", "LOUD")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "quiet")
    with pytest.raises(ConfigurationError, match="ACCELERATE_LOG_LEVEL='quiet'") as raised:
        get_logger("test.unknown")
    assert not isinstance(raised.value, AttributeError)  # the import of a name would hide it
