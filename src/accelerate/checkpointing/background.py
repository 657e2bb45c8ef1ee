"""One job in a thread while training goes on; what goes wrong in it is raised where one waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger

logger = get_logger(__name__)


class Background:
    """At most one job at a time.

    The thread is no daemon: the interpreter waits for it before it ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Run a job in a thread, after the one before has ended.

        Raises:
            Exception: what the job before has raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="accelerate-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when no job is running any more.

        Raises:
            Exception: what the last job has raised; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except Exception as error:  # raised again by wait()
            logger.error(f"A checkpoint was not saved: {error}", main_process_only=False)
            self._error = error
