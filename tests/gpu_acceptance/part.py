"""The process of one part: call its function, and write what came of it to `result.json`."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from .setting import NotAvailableError, Setting

PASSED, FAILED, NOT_AVAILABLE = "passed", "failed", "not available"


def call(function: str, setting: Setting) -> dict[str, Any]:
    """Return status, reason and figures of a part."""
    start = time.perf_counter()
    status, reason = PASSED, ""
    try:
        for module in setting.imports:
            import_module(module)
        module, _, name = function.partition(":")
        getattr(import_module(module, __package__), name)(setting)
    except NotAvailableError as error:
        status, reason = NOT_AVAILABLE, str(error)
    except Exception as error:
        traceback.print_exc()
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    return {
        "status": status,
        "reason": reason,
        "seconds": time.perf_counter() - start,
        "figures": [{**vars(figure), "is_met": figure.is_met} for figure in setting.figures],
        "facts": setting.facts,
        "notes": setting.notes,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=Path, help="JSON file: the part and its setting")
    request = json.loads(parser.parse_args().request.read_text(encoding="utf-8"))
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):  # the runner sends it before it stops a part
        faulthandler.register(signal.SIGUSR1)
    folder = Path(request["folder"])
    os.chdir(folder)
    results = Path(request["results"])
    setting = Setting(
        device=request["device"],
        tiny=request["tiny"],
        folder=folder,
        imports=tuple(request["imports"]),
        results=json.loads(results.read_text(encoding="utf-8")) if results.exists() else {},
    )
    result = call(request["function"], setting)
    target = Path(request["result"])
    written = target.with_suffix(".part")
    written.write_text(json.dumps(result), encoding="utf-8")
    os.replace(written, target)
    return int(result["status"] == FAILED)


if __name__ == "__main__":
    sys.exit(main())
