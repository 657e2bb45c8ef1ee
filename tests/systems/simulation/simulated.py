"""What Python is like on Windows and on macOS ($SIMULATED_SYSTEM), as far as Linux can show it.

The standard library and torch are imported first and keep what they need. accelerate, and what is imported
later, find a system without the names, modules, folders and signals that it does not have. On Windows, calls
refuse what they refuse there: to open a folder, to sync a file that is open to read, to rename to a name in
use, to rename, replace or delete what is open or mapped, to make a file with a name that is not allowed.
Files are checked below $SIMULATED_FOLDER. `os.name` and the form of paths stay those of Linux.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

FIRST = (
    "asyncio concurrent.futures.process ctypes faulthandler getpass glob inspect logging.handlers"
    " multiprocessing.connection multiprocessing.managers multiprocessing.pool"
    " multiprocessing.popen_spawn_posix multiprocessing.queues multiprocessing.resource_tracker"
    " multiprocessing.spawn multiprocessing.synchronize pathlib platform pickle psutil random shutil"
    " socket ssl sysconfig tempfile unittest.mock urllib.request uuid huggingface_hub numpy rich.console"
    " safetensors.torch torch torch.distributed torch.distributed.elastic.multiprocessing"
    " torch.multiprocessing torch.utils.data yaml"
)
MODULES = "fcntl grp pwd resource syslog termios tty pty curses readline"
OS_NAMES = (
    "fork forkpty register_at_fork sched_getaffinity sched_setaffinity sched_yield memfd_create waitid"
    " wait3 wait4 P_PID P_ALL WEXITED WNOHANG WNOWAIT CLD_EXITED O_CLOEXEC O_DIRECTORY O_NONBLOCK"
    " O_TMPFILE O_DIRECT getuid geteuid getgid getegid getpgid getpgrp getsid setsid setpgid killpg"
    " tcgetpgrp uname nice chown fchown fchmod pread pwrite posix_fadvise posix_fallocate statvfs sync"
    " mkfifo pidfd_open getloadavg sysconf setuid initgroups eventfd pipe2 fdatasync lchown confstr"
    " sendfile copy_file_range"
)
SIGNALS = (
    "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGQUIT SIGCONT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGCHLD SIGCLD"
    " SIGPIPE SIGALRM"
)
SIGNAL_CALLS = (
    "pthread_sigmask pthread_kill sigwait sigpending setitimer alarm siginterrupt sigtimedwait"
    " sigwaitinfo pause SIG_BLOCK SIG_UNBLOCK SIG_SETMASK SIGRTMAX SIGRTMIN"
)
LINUX_ALONE = (
    "sched_getaffinity sched_setaffinity memfd_create waitid P_PID P_ALL WEXITED WNOWAIT O_TMPFILE O_DIRECT"
    " posix_fadvise posix_fallocate pidfd_open eventfd copy_file_range fdatasync pipe2"
)
LINUX_SIGNALS = "SIGRTMAX SIGRTMIN SIGCLD sigtimedwait sigwaitinfo"
SIGBREAK = 21
INTERRUPTED = 0xC000013A
MAPS = "/proc/self/maps"  # read here alone
FORBIDDEN = set('<>:"|?*\\')
KNOWING = ("psutil", "torch", "multiprocessing", "tempfile")
"""Packages that do without /proc on other systems, and use it here."""


def simulate() -> None:
    warnings.filterwarnings("ignore", category=EncodingWarning)
    for name in FIRST.split():
        importlib.import_module(name)
    sys.modules["sysconfig"].get_config_vars()  # from a file that is named after the system
    system = os.environ["SIMULATED_SYSTEM"]
    is_windows = system == "win32"
    if is_windows:
        vars(signal).update(CTRL_C_EVENT=Event(0), CTRL_BREAK_EVENT=Event(1))
        _refuse_calls()
        _end_processes()
    before = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    kept, _, _ = (_copy_for(before, module) for module in (os, signal, sys.modules["socket"]))
    _remove(os, OS_NAMES if is_windows else LINUX_ALONE)
    _remove(signal, f"{SIGNALS} {SIGNAL_CALLS}" if is_windows else LINUX_SIGNALS)
    _spawn(is_windows)
    if is_windows:
        for name in MODULES.split():
            sys.modules[name] = None  # type: ignore[assignment]
        _few_signals()
        _torch_and_psutil()
    _hide_folders((os, kept), checks_names=is_windows)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"accelerate\.")
    sys.platform = system


def _remove(module: types.ModuleType, names: str) -> None:
    for name in names.split():
        vars(module).pop(name, None)


class Event(int):
    name = "an event of the console"


class OnLinux:
    """`sys`, but for the name of the system."""

    platform = "linux"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def _copy_for(modules: list[types.ModuleType], original: types.ModuleType) -> types.ModuleType:
    """Give modules that were imported before a whole copy."""
    copy = types.ModuleType(original.__name__)
    vars(copy).update(vars(original))
    for module in modules:
        if module.__name__ not in ("__main__", "__mp_main__", "sitecustomize", __name__):
            vars(module).update({name: copy for name, value in vars(module).items() if value is original})
    return copy


def _ours(path: Any) -> str | None:
    """The absolute path where files are checked, else None."""
    if isinstance(path, int):
        return None
    whole = os.path.abspath(os.fsdecode(path))
    return whole if whole.startswith(f"{os.environ['SIMULATED_FOLDER']}/") else None


def _refuse_calls() -> None:
    names = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "kill")
    original = {name: getattr(os, name) for name in names}
    readlink, listdir, fcntl = os.readlink, os.listdir, importlib.import_module("fcntl")

    def in_use(path: str) -> bool:
        with open(MAPS, encoding="utf-8", errors="replace") as file:
            used = [line.rstrip("\n")[73:] for line in file]
        for number in listdir("/proc/self/fd"):
            try:
                used.append(readlink(f"/proc/self/fd/{number}"))
            except OSError:
                continue
        return any(each == path or each.startswith(f"{path}/") for each in used)

    def check(*paths: Any) -> None:
        for path in paths:
            if (whole := _ours(path)) and in_use(whole):
                raise PermissionError(errno.EACCES, "The file is used by a process", str(path))

    def open_file(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return int(original["open"](path, flags, mode, **more))

    def fsync(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        original["fsync"](descriptor)

    def rename(old: Any, new: Any, **more: Any) -> None:
        if _ours(new) and os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, "The file already exists", str(new))
        check(old)
        original["rename"](old, new, **more)

    def replace(old: Any, new: Any, **more: Any) -> None:
        if _ours(new) and os.path.isdir(new):
            raise PermissionError(errno.EACCES, "Access is denied", str(new))
        check(old, new)
        original["replace"](old, new, **more)

    def unlink(path: Any, **more: Any) -> None:
        check(path)
        original["unlink"](path, **more)

    def kill(pid: int, number: int) -> None:
        original["kill"](pid, 9 if number > 1 else number)

    def rmdir(path: Any, **more: Any) -> None:
        check(path)
        original["rmdir"](path, **more)

    vars(os).update(open=open_file, fsync=fsync, rename=rename, replace=replace, kill=kill)
    vars(os).update(unlink=unlink, remove=unlink, rmdir=rmdir)
    os.supports_dir_fd.clear()
    os.supports_fd.clear()
    sys.modules["shutil"]._use_fd_functions = False  # type: ignore[attr-defined]


def _end_processes() -> None:
    """Let `Popen` end processes as on Windows, where nothing but a console event can be sent."""
    popen, kill, killed = subprocess.Popen, os.kill, set[int]()
    handle, start = popen._handle_exitstatus, popen.__init__  # type: ignore[attr-defined]

    def terminate(self: Any) -> None:
        if self.poll() is None:
            killed.add(self.pid)
            kill(self.pid, 9)

    def send_signal(self: Any, number: int) -> None:
        if self.poll() is None:
            if number not in (signal.SIGTERM, 0, 1):
                raise ValueError(f"Unsupported signal: {number}")
            if number == signal.SIGTERM:  # the events reach nothing but whole groups of processes
                terminate(self)

    def exit_status(self: Any, status: int, **more: Any) -> None:
        handle(self, status, **more)
        if self.returncode < 0:
            self.returncode = 1 if self.pid in killed else INTERRUPTED

    def init(self: Any, *args: Any, **more: Any) -> None:
        if more.get("preexec_fn") or more.get("pass_fds"):
            raise ValueError("preexec_fn and pass_fds are not supported on Windows platforms")
        start(self, *args, **{**more, "start_new_session": False})

    vars_of: Any = popen
    vars_of.terminate = vars_of.kill = terminate
    vars_of.send_signal, vars_of._handle_exitstatus, vars_of.__init__ = send_signal, exit_status, init


def _few_signals() -> None:
    names = ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV")
    allowed = (*(getattr(signal, name) for name in names), SIGBREAK)
    original = signal.signal

    def set_handler(number: int, handler: Any) -> Any:
        if number not in allowed:
            raise ValueError("invalid signal value")
        return original(number, handler)

    vars(signal).update(SIGBREAK=SIGBREAK, signal=set_handler)


def _spawn(is_windows: bool) -> None:
    """Make "spawn" the default, and on Windows the only method to start processes."""
    context: Any = importlib.import_module("multiprocessing.context")
    for name in ("fork", "forkserver") if is_windows else ():
        del context._concrete_contexts[name]
    context._default_context._default_context = context._concrete_contexts["spawn"]
    for name, module in sys.modules.items():
        if name.startswith("multiprocessing.") and module is not context:  # it starts processes as on Linux
            vars(module).update({name: OnLinux() for name, value in vars(module).items() if value is sys})


def _torch_and_psutil() -> None:
    psutil, dist, store = sys.modules["psutil"], sys.modules["torch.distributed"], Any
    store, memory_info = dist.TCPStore, psutil.Process.memory_info
    open_store = store.__init__

    def without_libuv(self: Any, *args: Any, **more: Any) -> None:
        if len(args) > 8 or more.get("use_libuv", True):
            raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
        open_store(self, *args, **more)

    @functools.wraps(memory_info)
    def with_peak(self: Any) -> Any:
        return types.SimpleNamespace(**memory_info(self)._asdict(), peak_wset=memory_info(self).rss)

    for name, module in sys.modules.items():
        if name.startswith("torch.distributed.elastic.multiprocessing"):
            vars(module).update({"IS_WINDOWS": True} if "IS_WINDOWS" in vars(module) else {})
    store.__init__ = without_libuv
    psutil.Process.memory_info = with_peak
    del sys.modules["faulthandler"].register  # type: ignore[attr-defined]
    del sys.modules["socket"].AF_UNIX  # type: ignore[attr-defined]


def _hide_folders(modules: Sequence[types.ModuleType], checks_names: bool) -> None:
    """Hide /proc and /sys, and check the names of new files."""

    def is_hidden(path: Any) -> bool:
        if isinstance(path, int) or path == MAPS or not os.fsdecode(path).startswith(("/proc/", "/sys/")):
            return False
        frame = sys._getframe(1)
        library = os.path.dirname(os.__file__)
        while frame := frame.f_back:  # type: ignore[assignment]
            name = str(frame.f_globals.get("__name__"))
            if name.startswith(KNOWING):
                return False
            if name != __name__ and not (
                frame.f_code.co_filename.startswith((library, "<"))
                and "site-packages" not in frame.f_code.co_filename
            ):
                return True
        return False

    def hide(function: Callable[..., Any]) -> Callable[..., Any]:
        def hidden(path: Any = ".", *args: Any, **more: Any) -> Any:
            if is_hidden(path):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            return function(path, *args, **more)

        return hidden

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[0] is not None and is_hidden(args[0]):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", args[0])
        if checks_names and event in ("open", "os.mkdir", "os.rename"):
            path = args[1] if event == "os.rename" else args[0]
            whole = path is not None and _ours(path)
            parts = whole.split("/") if whole else []
            if any(FORBIDDEN & set(part) or part.endswith((".", " ")) for part in parts):
                raise OSError(
                    errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect", path
                )

    for module in modules:
        for name in ("stat", "lstat", "listdir", "scandir", "readlink", "access"):
            setattr(module, name, hide(getattr(module, name)))
    sys.addaudithook(audit)
