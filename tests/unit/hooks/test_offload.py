from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module, offload_with_hook

X = torch.ones(1, 2)


class Recorded(nn.Linear):
    """A layer that notes where it is sent; there is one device here."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sent: list[str] = []

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.sent.append(str(args[0]))
        return self


def test_a_model_comes_and_the_one_before_goes() -> None:
    first, second = Recorded(), Recorded()
    one = offload_with_hook(first, "meta", None)
    two = offload_with_hook(second, "meta", one)
    assert (first.sent, second.sent) == (["cpu"], ["cpu"])
    (args, kwargs) = two.hook.pre_forward(second, X, x=X)
    assert args[0].is_meta
    assert kwargs["x"].is_meta
    assert (first.sent, second.sent) == (["cpu", "cpu"], ["cpu", "meta"])
    two.offload()
    assert second.sent[-1] == "cpu"
    two.remove()
    assert not hasattr(second, "_hf_hook")


def test_a_model_that_is_there_disturbs_no_one() -> None:
    first, second = Recorded(), Recorded()
    one = offload_with_hook(first, "cpu", None)
    two = offload_with_hook(second, "cpu", one)
    second(X)
    assert first.sent == ["cpu"]
    assert isinstance(two, UserCpuOffloadHook)
    assert vars(two) == {"model": second, "hook": second._hf_hook}


def test_where_nothing_is_said_it_is_this_process_s_device() -> None:
    hook = CpuOffload()
    assert hook.execution_device == torch.device("cpu")
    assert hook.prev_module_hook is None
    layer = add_hook_to_module(nn.Linear(2, 2), hook)
    assert layer(X).shape == (1, 2)
