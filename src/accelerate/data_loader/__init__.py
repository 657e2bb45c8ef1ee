"""Data loaders that shard the batches of a dataset over the processes of a run."""

from __future__ import annotations

from typing import Any

from accelerate.base import attach
from accelerate.devices import is_torch_xla_available

_load, __dir__, __all__ = attach(__name__)

# Public by accident in the interface: loader arguments that came with a torch version, and that version.
additional_kwargs: dict[str, Any] = {"in_order": True}
v = "2.6.0"


def __getattr__(name: str) -> Any:
    # Its base class is torch_xla's: the name exists only where that is installed.
    if name == "MpDeviceLoaderWrapper" and is_torch_xla_available():
        return _load("wrapper_for_xla")()
    return _load(name)
