"""What is registered for each communication hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accelerate.base import DDPCommunicationHookType as Kind
from accelerate.plugins import DistributedDataParallelKwargs
from accelerate.plugins.comm_hooks import HOOKS, WRAPPERS, rename_hook


class Registry:
    """Replaces a wrapped model and stores what is registered on it."""

    registered: tuple[Any, Callable[..., Any]] | None = None

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        self.registered = (state, hook)


def register(**kwargs: Any) -> tuple[Any, Callable[..., Any]] | None:
    model = Registry()
    DistributedDataParallelKwargs(**kwargs).register_comm_hook(model)  # type: ignore[arg-type]
    return model.registered


def test_every_kind_has_a_row() -> None:
    assert set(HOOKS) == set(Kind) - {Kind.NO}


@pytest.mark.parametrize("hook", [Kind.FP16, Kind.BF16])
@pytest.mark.parametrize("wrapper", [Kind.NO, Kind.FP16, Kind.BF16])
def test_hook_names_are_accepted_by_torch(hook: Kind, wrapper: Kind) -> None:
    registered = register(comm_hook=hook, comm_wrapper=wrapper)
    assert registered is not None
    state, function = registered
    assert state is None
    assert function.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")
    assert list(inspect.signature(function).parameters)[1] == "bucket"


def test_the_plain_hooks_are_those_of_torch() -> None:
    assert register(comm_hook="fp16") == (None, default_hooks.fp16_compress_hook)


@pytest.mark.parametrize(
    ("name", "function"),
    [("power_sgd", powerSGD_hook.powerSGD_hook), ("batched_power_sgd", powerSGD_hook.batched_powerSGD_hook)],
)
def test_power_sgd_gets_a_state_with_the_options(name: str, function: Callable[..., Any]) -> None:
    options = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 7}
    registered = register(comm_hook=name, comm_state_option=options)
    assert registered is not None
    state, hook = registered
    assert hook is function
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (3, 7)


def test_a_wrapper_calls_the_hook_inside() -> None:
    calls = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append((state, bucket))

    assert WRAPPERS[Kind.NO](hook) is hook
    rename_hook(hook)("state", "bucket")
    assert calls == [("state", "bucket")]


def test_without_a_hook_nothing_is_registered() -> None:
    assert register() is None


@pytest.mark.parametrize("extra", [{"comm_wrapper": "bf16"}, {"comm_state_option": {"warm_start": False}}])
def test_arguments_without_effect_give_a_warning(extra: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="no effect without comm_hook"):
        assert register(**extra) is None


def test_options_that_a_hook_does_not_take_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="only power_sgd and batched_power_sgd"):
        assert register(comm_hook="fp16", comm_state_option={"warm_start": False}) is not None
