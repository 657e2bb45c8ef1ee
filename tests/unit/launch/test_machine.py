from __future__ import annotations

from accelerate.devices import CPU
from accelerate.launch import look


def test_a_look_with_cpu_asks_for_no_devices() -> None:
    here = look({}, cpu=True)
    assert here.hardware is CPU
    assert here.devices == 1
    assert here.cores >= 1
    assert not here.has_accelerator
