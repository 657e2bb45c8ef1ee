"""Calls that replica groups cannot repeat raise an error with the fix."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError, StateError
from accelerate.recovery.membership import Members
from accelerate.recovery.session import Recovery


def new_recovery(**attributes: Any) -> Recovery:
    """A session with these attributes, without a store or other groups."""
    recovery = Recovery.__new__(Recovery)
    vars(recovery).update(attributes)
    return recovery


def test_a_state_is_not_loaded_after_a_step() -> None:
    new_recovery(_has_committed=False).check_load()
    with pytest.raises(StateError, match="before the first step"):
        new_recovery(_has_committed=True).check_load()


def test_a_step_without_backward_of_the_accelerator_is_refused() -> None:
    flags, members = torch.nn.Parameter(torch.zeros(3)), Members(0, 2)
    recovery = new_recovery(_flags=flags, _membership=object(), members=members)
    with pytest.raises(StateError, match=r"in place of loss\.backward"):
        recovery._share_buffers()


def test_a_backward_pass_after_a_step_of_the_same_batch_is_refused() -> None:
    with pytest.raises(StateError, match=r"before the first optimizer\.step"):
        new_recovery(in_pass=True, _outcome=True).begin_backward()


def test_the_number_of_micro_batches_is_not_changed_within_a_pass(states: None) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator._recovery = cast("Any", new_recovery(in_pass=True))
    with pytest.raises(ConfigurationError, match="between two passes"):
        accelerator.gradient_accumulation_steps = 3
    accelerator._recovery.in_pass = False
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3
    accelerator._recovery = None
