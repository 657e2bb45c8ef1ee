"""Execution of a script whose training is recorded.

The script is not changed. Methods of the `Accelerator`, of loaders and of torch are replaced in this process
before the script begins. A run that is not verified has none of this.
"""

from __future__ import annotations

from accelerate import rng, torch_private
from accelerate.base import environ
from accelerate.launch import run_script
from accelerate.verification import overrides
from accelerate.verification.options import SEED, Options
from accelerate.verification.recorder import Finished, Recorder


def _run_to_end(words: list[str]) -> None:
    """Runs the script, which may end itself by `sys.exit()` as a success."""
    try:
        run_script(words)
    except SystemExit as error:
        if isinstance(error, Finished) or error.code not in (None, 0):
            raise


def main(words: list[str]) -> None:
    """Runs the target with its arguments, and ends it after some optimizer steps."""
    options = Options.of(environ.current())
    recorder = Recorder(options)
    rng.set_seed(SEED)
    if not options.keeps_dropout:
        torch_private.turn_off_dropout()
    torch_private.draw_for_whole_batches(recorder)
    overrides.install(recorder)
    try:
        _run_to_end(words)
        recorder.finish()
    except Finished:
        pass
    finally:
        recorder.close()
