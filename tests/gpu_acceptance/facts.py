"""What machine this is, and whether the device has as much free memory after the run as before."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .setting import NotAvailableError, Setting

PACKAGES = ("torchao", "triton", "safetensors", "numpy", "pytest")
MIB = 2**20
SLACK = 64 * MIB  # the driver's own bookkeeping varies


def collect(setting: Setting) -> None:
    """Find device and versions, and check that the package is the one of this source."""
    import torch

    import accelerate
    from accelerate.devices import get_driver_version, of_device

    source = Path(__file__).parents[2] / "src"
    assert Path(accelerate.__file__).is_relative_to(source), f"imported {accelerate.__file__}, not {source}"
    if setting.device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise NotAvailableError(
                "torch finds no accelerator: pass --device cpu --tiny to see the parts run"
            )
        setting.device = found.type
    backend = of_device(torch.device(setting.device))
    module = backend.torch_module()
    named = getattr(module, "get_device_name", None)
    count = backend.count()
    setting.facts["device"] = {
        "type": setting.device,
        "name": str(named(0))
        if named and not setting.is_host
        else platform.processor() or platform.machine(),
        "count": count,
        "total_memory": backend.total_memory(0),
    }
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
    if setting.device == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        versions["driver"] = get_driver_version() if shutil.which("nvidia-smi") else "unknown"
    setting.facts["versions"] = versions | {name: found for name in PACKAGES if (found := installed(name))}
    setting.facts["memory"] = {"free": free_memory(setting)}
    assert count >= 1
    assert setting.make_accelerator().device.type == setting.device


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def free_memory(setting: Setting) -> int:
    """Return free bytes of the first device after a first tensor, which starts the driver."""
    import torch

    torch.ones(1, device=setting.device)
    setting.synchronize()
    return int(setting.backend.free_memory(0))


def compare_free_memory(setting: Setting) -> None:
    """Fail where a process that has ended still holds memory of the device."""
    if setting.is_host:
        setting.report("memory of a device", 0, "B")
        return
    before = (setting.results.get("memory") or {}).get("free")
    assert before is not None, "the first part has not said how much memory was free"
    lost = before - free_memory(setting)
    setting.report("memory of the device that is not free any more", lost, "B", at_most=SLACK)
    assert lost <= SLACK, f"{lost / MIB:.0f} MiB of the device are still taken"
