from __future__ import annotations

import torch
from torch import nn

from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module, remove_hook_from_module


def test_weights_are_small_in_between() -> None:
    layer = nn.Linear(4, 4)
    expected = nn.Linear(4, 4)
    expected.load_state_dict({name: each.bfloat16() for name, each in layer.state_dict().items()})
    add_hook_to_module(layer, LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False))
    x = torch.randn(2, 4)
    for _ in range(2):
        assert layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer(x), expected(x))
    remove_hook_from_module(layer)
    assert layer.weight.dtype == torch.float32


def test_arguments_are_attributes() -> None:
    hook = LayerwiseCastingHook(torch.float16, torch.float32, True)
    assert vars(hook) == {
        "storage_dtype": torch.float16,
        "compute_dtype": torch.float32,
        "non_blocking": True,
    }
