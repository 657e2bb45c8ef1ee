"""An accelerator that runs on the CPU and behaves as one: streams are asynchronous, its memory is its own.

Importing this package registers the device type "sim" with torch, through torch's interface for devices of
other packages (PrivateUse1). The C++ part is built by torch on first use, in about a minute, and kept by its
sources and the versions of torch and Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCES = Path(__file__).with_name("csrc")
CACHE = Path(__file__).parents[2] / ".cache" / "simulated_device"
NAME = "simulated_device_native"


def _build() -> Path:
    """Return the compiled library, after building it where the sources or the versions are new."""
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.version, *(p.read_text() for p in sorted(SOURCES.iterdir()))):
        digest.update(part.encode())
    library = CACHE / f"{NAME}-{digest.hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together build it once
        if not library.exists():
            from torch.utils import cpp_extension

            # In a new folder: torch waits without end for a build that was ended in the same one.
            with tempfile.TemporaryDirectory(dir=CACHE) as folder, _ninja_on_path():
                cpp_extension.load(
                    NAME,
                    [str(source) for source in sources],
                    extra_cflags=["-O1", "-g0"],
                    build_directory=folder,
                    is_python_module=False,
                )
                os.replace(Path(folder) / f"{NAME}.so", library)
    return library


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Let torch find the ninja of this environment, also where the environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _load() -> Any:
    library = str(_build())
    spec = spec_from_file_location(NAME, loader=ExtensionFileLoader(NAME, library))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register() -> None:
    """Called by torch at its import, where this package is installed as one that registers a device."""


def _register() -> ModuleType:
    torch.utils.rename_privateuse1_backend("sim")
    from tests.simulated_device import module

    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return module


native = _load()
sim = _register()
