"""Private names and attributes of torch that the package uses, in one file per topic.

Each private name of a torch module is a row of `NAMES`, with a reason and a fallback, and an attribute of
this package. The functions read private attributes of torch objects, or replace attributes of these objects
or of torch itself. All other files use this package: `tests/architecture/test_torch_private.py` checks that
no file outside of it uses private names of torch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from accelerate.base import attach
from accelerate.torch_private.names import resolve_private_name  # a hang report must not import it

_load, __dir__, __all__ = attach(__name__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load(name)
    value = resolve_private_name(name)
    globals()[name] = value  # the next lookup does not call this function
    return value


if sys.platform == "win32" and dist.is_available():
    from accelerate.torch_private.processes import default_to_stores_without_libuv

    default_to_stores_without_libuv()
