"""Empty caches and drop references."""

import gc
from typing import Any

from accelerate.devices.hardware_table import detect


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that torch holds but does not use back to the device.

    Args:
        garbage_collection: Collect unreachable Python objects first, so that their memory is among it.
    """
    if garbage_collection:
        gc.collect()
    detect().empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Drop references and free what they held: `model, optimizer = release_memory(model, optimizer)`.

    Args:
        *objects: What is no longer needed. The memory is free once the caller's own names are rebound too.

    Returns:
        A None for each object, to assign to the same names.
    """
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released
