"""Objects that are restored after a compared forward."""

from __future__ import annotations

import torch

from accelerate.strategies.object_state import captured


def test_tensors_of_inference_mode_are_restored() -> None:
    with torch.inference_mode():
        held = [torch.zeros(2)]
    restore = captured([held])
    with torch.inference_mode():
        held[0].add_(1)
    restore()
    assert held[0].tolist() == [0, 0]
