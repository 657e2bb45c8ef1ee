"""A fake torch module of a device that records its calls."""

import sys
from types import ModuleType
from typing import Any

import pytest

from accelerate.devices import BACKENDS, detect


class Recorder:
    """Replaces any module: records each call under its dotted path and returns a value of `answers`."""

    def __init__(self, path: str, calls: list, answers: dict) -> None:
        self.__dict__.update(_path=path, _calls=calls, _answers=answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._path}.{name}", self._calls, self._answers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorder) and other._path == self._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __str__(self) -> str:
        return self._path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._path, *args, *kwargs.items()))
        answer = self._answers.get(self._path.rpartition(".")[2], self._path)
        return answer(*args) if callable(answer) else answer


class FakeTorch:
    """The recorded torch, put in place of the modules of every extension too."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.answers: dict[str, Any] = {
            "is_available": True,
            "device_count": 4,
            "current_device": 2,
            "mem_get_info": (10, 40),
            "is_bf16_supported": True,
            "addressable_device_count": 4,
            "local_ordinal": 2,
            "get_memory_info": {"bytes_limit": 40, "bytes_used": 30},
            "xla_device_hw": "TPU",
            "is_macos_or_newer": True,
            "get_rng_state": 5,
            "tensor": 5,
        }

    def module(self, name: str) -> Any:
        return Recorder(name, self.calls, self.answers)

    @property
    def paths(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Replace torch and the extensions of the table by recorders; detect anew before and after."""
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake.module("torch"))
    extensions = {backend.extension for backend in BACKENDS if backend.extension}
    for name in extensions | {backend.module for backend in BACKENDS if backend.name == "xla"}:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            plain = depth < len(parts) or path in extensions
            module: Any = ModuleType(path) if plain else fake.module(path)
            module.__spec__ = path  # what find_spec returns
            monkeypatch.setitem(sys.modules, path, module)
    for name in ("torch_xla.runtime", "torch_xla.amp"):
        monkeypatch.setitem(sys.modules, name, fake.module(name))
    detect.cache_clear()
    yield fake
    detect.cache_clear()
