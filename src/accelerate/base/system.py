"""Questions about the machine that are not about a device."""

import logging
import os
import platform
import re
import stat
from pathlib import Path

# Processes that use many threads were seen to hang on kernels older than this one.
MINIMUM_LINUX_KERNEL = (5, 5, 0)

_logger = logging.getLogger(__name__)


def check_os_kernel() -> None:
    """Warn, in the log, when the Linux kernel is older than 5.5; say nothing on other systems.

    To be called on one process of a machine: each process would say the same.
    """
    if platform.system() != "Linux":
        return
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    if match is None:
        return
    version = tuple(int(part or 0) for part in match.groups())
    if version >= MINIMUM_LINUX_KERNEL:
        return
    wanted = ".".join(map(str, MINIMUM_LINUX_KERNEL))
    _logger.warning(
        "Linux kernel %s is older than %s, the oldest that is recommended: processes may hang. "
        "Upgrade the kernel to %s or newer.",
        release,
        wanted,
        wanted,
    )


def process_home() -> str | None:
    """Name what process numbers belong to: the run of this kernel and the container on it.

    Returns:
        Equal in two processes when a number means the same process to both; None where the system does not
        say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux, or /proc is not mounted
        return None


def expanded(text: str | os.PathLike[str]) -> Path:
    """Return a path with a leading `~` replaced; where that home is unknown, it stays as it is."""
    try:
        return Path(os.path.expanduser(text))
    except ValueError:  # characters that no name of a user has
        return Path(text)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file at a path.

    Raises:
        OSError: The system does not let this process look, or takes no such path; `strerror` says why.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: characters that no path has
        return False
