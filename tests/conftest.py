"""Every test starts with clean states; a test that leaks fails.

A test that builds a state, directly or through an `Accelerator`, uses the fixture `states`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import HealthCheck, settings

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "TORCHELASTIC_")
STARTER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
FIXED_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "KMP_DUPLICATE_LIB_OK": "True",  # these two are set by scikit-learn, which transformers may import
    "KMP_INIT_AT_FORK": "FALSE",
    "CUDA_MODULE_LOADING": "LAZY",  # set by builds of torch for CUDA when they look for devices
    # torch writes its own choice into the environment when its compiler is first imported, by any optimizer.
    "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), "torchinductor_accelerate_tests"),
}
STATES = ("AcceleratorState", "PartialState", "GradientState")
PATIENCE = 5.0  # seconds that threads and processes get to end after their test
POLL = 0.02
SECONDS_OF_SLOW_TESTS = 900  # of tests without a timeout of their own, on a busy machine

if not hasattr(psutil.Process, "net_connections"):  # its name since psutil 6
    psutil.Process.net_connections = psutil.Process.connections


class Watch(NamedTuple):
    """One kind of resource that a test may leak, and how long its removal may take."""

    kind: str
    list_all: Callable[[], set[Hashable]]
    patience: float = 0.0
    compare: Callable[[set[Hashable], set[Hashable]], set[Hashable]] = set.difference
    name: Callable[[Any], object] = str


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests one known environment, whatever the shell or the home folder of the developer holds."""
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in STARTER_VARIABLES:
            del os.environ[name]
    os.environ.update(FIXED_VARIABLES)
    # A busy machine may take any time for an example.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process of a test would compile the package anew
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests more time, and leave out FSDP 1 on the simulated device.

    There torch does not replace the data of parameters.
    """
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS_OF_SLOW_TESTS))
    if "SIMULATED_DEVICES" not in os.environ:  # see tests/simulated_device
        return
    left_out = [item for item in items if trains_with_fsdp1(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def trains_with_fsdp1(item: pytest.Item) -> bool:
    values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_named = "fsdp1" in item.name or "fsdp_1" in item.name
    variables = values.get("variables")
    has_variable = isinstance(variables, dict) and variables.get("FSDP_VERSION") == "1"
    return is_named or has_variable or values.get("version") == 1


def pytest_collection_finish() -> None:
    freeze()


@pytest.fixture(scope="module", autouse=True)
def freezes_imported_modules() -> Iterator[None]:
    """Freeze again after a module of tests that has imported a large library."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        freeze()


def freeze() -> None:
    """Exclude all present objects, such as tests and imported modules, from further garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the default config file and the recorded runs of the developer out of the tests."""
    names = ("HF_HOME", "XDG_STATE_HOME")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update({name: str(tmp_path_factory.mktemp(name.lower())) for name in names})
    yield
    for name in names:
        os.environ.pop(name)
    os.environ.update(before)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(empty_home: None) -> Iterator[None]:
    """Fail a test that leaks an environment variable, thread, process, port, process group or state."""
    variables = dict(os.environ)
    before = {watch: watch.list_all() for watch in WATCHES}
    yield
    leaks = [describe(watch, left) for watch, known in before.items() if (left := list_left(watch, known))]
    reset_states()
    restore_variables(variables)
    if leaks:
        kill_processes(list_processes() - before[PROCESSES])
        pytest.fail("this test left behind\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def states() -> Iterator[None]:
    """Let a test build one of the states, or an `Accelerator`; they are reset after it."""
    yield
    reset_states()


def list_left(watch: Watch, known: set[Hashable]) -> list[Hashable]:
    """What differs from before the test, after a moment in which things may end by themselves."""
    deadline = time.monotonic() + watch.patience
    while left := watch.compare(watch.list_all(), known):
        gc.collect()  # a loader's workers end with the last reference to it, which a thread may hold
        if time.monotonic() > deadline:
            break
        time.sleep(POLL)
    return sorted(left, key=str)


def describe(watch: Watch, left: list[Hashable]) -> str:
    return f"{watch.kind}: {', '.join(str(watch.name(each)) for each in left)}"


def list_variables() -> set[Hashable]:
    return {f"{name}={value}" for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def list_threads() -> set[Hashable]:
    """All that Python started, but tqdm's monitor, which runs as long as the interpreter."""
    lasting = ("TMonitor", "_DummyThread")  # the other one is a thread of C++, such as that of a device
    return {thread for thread in threading.enumerate() if type(thread).__name__ not in lasting}


def list_processes() -> set[Hashable]:
    """The pids of the children of this process; psutil would read all processes of the machine for them."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    lasting = tracker._resource_tracker._pid if tracker else None  # Python keeps one for good
    return child_pids() - {lasting}


def child_pids() -> set[int]:
    pids: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                pids.update(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):  # another system, or a thread that has just ended
        return {child.pid for child in psutil.Process().children()}
    return pids


def list_ports() -> set[Hashable]:
    """The ports on which this process listens; psutil would read all connections of the machine for them."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:  # another system
        connections = psutil.Process().net_connections("tcp")
        return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return {port for descriptor in descriptors if (port := listening_port(descriptor))}


def listening_port(descriptor: int) -> int | None:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            is_tcp = (
                duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
            )
            listens = is_tcp and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return int(duplicate.getsockname()[1]) if listens else None
    except OSError:  # it has just been closed
        return None


def list_process_groups() -> set[Hashable]:
    distributed = sys.modules.get("torch.distributed")
    opened = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return {"torch.distributed"} if opened else set()


def list_states() -> set[Hashable]:
    return {name for name, cls in find_states() if cls._shared_state}


def restore_variables(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def name_process(pid: int) -> str:
    try:
        return str(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return f"pid {pid}, which has just ended"


def kill_processes(pids: set[Any]) -> None:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            process.wait()


def find_states() -> list[tuple[str, Any]]:
    """The state classes, when a test has imported them."""
    module = sys.modules.get("accelerate.state")
    return [(name, getattr(module, name)) for name in STATES] if module else []


def reset_states() -> None:
    """Bring the states and the process group back to where a fresh interpreter has them."""
    for _, cls in find_states():
        cls._reset_state()
    if list_process_groups():
        from accelerate.state import process_group

        process_group.close_group()


PROCESSES = Watch("child processes", list_processes, PATIENCE, name=name_process)
WATCHES = (
    Watch("environment variables", list_variables, compare=set.symmetric_difference),
    Watch("threads", list_threads, PATIENCE),
    PROCESSES,
    Watch("listening ports", list_ports, PATIENCE),
    Watch("process groups", list_process_groups),
    Watch("states (a test that builds one asks for the fixture `states`)", list_states),
)
