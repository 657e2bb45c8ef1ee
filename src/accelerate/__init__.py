"""One PyTorch training loop on one CPU, many GPUs or many machines.

The names of `__init__.pyi` are loaded on first use: `import accelerate` alone imports no torch.
"""

from typing import Any

from accelerate.base import attach

_load, __dir__, __all__ = attach(__name__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow, and few programs ask

        return version("accelerate")
    return _load(name)
