"""Bundles of keyword arguments."""

from __future__ import annotations

import inspect
import pickle
from datetime import timedelta
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from accelerate.base import ConfigurationError, DDPCommunicationHookType
from accelerate.plugins import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from accelerate.plugins.checks import fill


@pytest.mark.parametrize(
    ("handler", "kwargs"),
    [
        (AutocastKwargs(), {}),
        (AutocastKwargs(enabled=False, cache_enabled=True), {"enabled": False, "cache_enabled": True}),
        (GradScalerKwargs(init_scale=1024.0, growth_interval=2000), {"init_scale": 1024.0}),
        (
            DistributedDataParallelKwargs(
                find_unused_parameters=True, comm_hook=DDPCommunicationHookType.FP16
            ),
            {"find_unused_parameters": True},
        ),
        (InitProcessGroupKwargs(), {}),
        (InitProcessGroupKwargs(backend="gloo"), {"backend": "gloo"}),
        *(
            (InitProcessGroupKwargs(timeout=timedelta(minutes=count)), {"timeout": timedelta(minutes=count)})
            for count in (5, 10, 30)
        ),
    ],
)
def test_only_what_differs_from_the_defaults_is_passed_on(
    handler: KwargsHandler, kwargs: dict[str, Any]
) -> None:
    assert handler.to_kwargs() == kwargs


@pytest.mark.parametrize(("backend", "minutes"), [("nccl", 10), ("gloo", 30), (None, 30)])
def test_the_timeout_follows_the_backend(backend: str | None, minutes: int) -> None:
    assert InitProcessGroupKwargs(backend=backend).timeout == timedelta(minutes=minutes)


@pytest.mark.parametrize("timeout", [600, timedelta(0)])
def test_a_timeout_is_a_positive_duration(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout="):
        InitProcessGroupKwargs(timeout=timeout)


def test_containers_are_copies() -> None:
    handler = DistributedDataParallelKwargs(comm_state_option={"matrix_approximation_rank": 2})
    handler.to_dict(ignore_keys=())["comm_state_option"]["matrix_approximation_rank"] = 9
    assert handler.comm_state_option == {"matrix_approximation_rank": 2}


def test_the_comm_hook_is_no_argument_of_the_model() -> None:
    fields = DistributedDataParallelKwargs().to_dict()
    assert not [name for name in fields if name.startswith("comm_")]
    assert set(fields) <= set(inspect.signature(DistributedDataParallel.__init__).parameters)


@pytest.mark.parametrize(
    "wrong", [{"init_scale": 0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}]
)
def test_a_scale_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))}="):
        GradScalerKwargs(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"comm_hook": "zip"},
        {"comm_wrapper": "zip"},
        {"comm_wrapper": DDPCommunicationHookType.POWER_SGD},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": "25"},
    ],
)
def test_arguments_that_ddp_cannot_take_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))}="):
        DistributedDataParallelKwargs(**wrong)


def test_the_environment_fills_only_what_was_not_given() -> None:
    handler = AutocastKwargs(enabled=False)
    fill(handler, {"enabled": True, "cache_enabled": True})
    assert handler == AutocastKwargs(enabled=False, cache_enabled=True)


@pytest.mark.parametrize(
    "handler",
    [AutocastKwargs(), GradScalerKwargs(), InitProcessGroupKwargs(), DistributedDataParallelKwargs()],
)
def test_handlers_are_compared_by_value_and_can_be_pickled(handler: KwargsHandler) -> None:
    assert pickle.loads(pickle.dumps(handler)) == handler == type(handler)()


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor"])
def test_an_option_of_the_scaler_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}='x': it is not a number") as raised:
        GradScalerKwargs(**{name: "x"})
    assert isinstance(raised.value, TypeError)
