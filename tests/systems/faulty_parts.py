"""A table of parts for the test of the acceptance run: most of them end badly."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu_acceptance.table import Part

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def collect(setting):
    setting.facts["device"] = {"type": "cpu", "name": "a fake"}
    setting.facts["versions"] = {"python": "3"}


def pass_it(setting):
    assert Path.cwd() == setting.folder
    Path("file").write_text("is removed with the folder")
    setting.report("speed", 2.0, "x", at_least=1.5)


def fail(setting):
    setting.report("before the failure", 1, "")
    raise ValueError("planted")


def miss_budget(setting):
    setting.report("speed", 2.0, "x", at_most=1.5)


def lack(setting):
    from gpu_acceptance.setting import NotAvailableError

    setting.note("a remark")
    raise NotAvailableError("the machine has none")


def hang(setting):
    subprocess.Popen(SLEEP, start_new_session=True)
    time.sleep(600)


def print_garbage(setting):
    os.write(1, bytes(range(256)) * 100 + b"\nthe last line\xff")
    os._exit(3)


def write_garbage(setting):
    (setting.folder.parent / "result.json").write_bytes(b'{"status": \xff\xfe')
    os._exit(0)


def report_no_number(setting):
    setting.report("speed", float("nan"), "x")


def leave_process(setting):
    subprocess.Popen(SLEEP, start_new_session=True)


def leave_file(setting):
    tempfile.mkstemp(prefix="forgotten-")


def fail_in_exit(setting):
    import atexit

    atexit.register(os._exit, 7)


FACTS = Part("facts", "faulty_parts:collect", 30)
PARTS = tuple(
    Part(name, f"faulty_parts:{name}", 2 if name == "hang" else 30, alone=name == "miss_budget")
    for name in (
        "hang",
        "pass_it",
        "fail",
        "miss_budget",
        "lack",
        "print_garbage",
        "write_garbage",
        "report_no_number",
        "leave_process",
        "leave_file",
        "fail_in_exit",
    )
)
LEFT = Part("nothing_left", "faulty_parts:pass_it", 30)
