"""GradientState: whether to step, and the stack of loaders that are being read."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from accelerate.plugins import GradientAccumulationPlugin
from accelerate.state import GradientState

pytestmark = pytest.mark.usefixtures("states")


class Loader:
    def __init__(self, end: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end
        self.remainder = remainder


def test_a_fresh_state() -> None:
    state = GradientState()
    assert state.initialized
    assert state.__dict__ is GradientState._shared_state
    assert state.__dict__["sync_gradients"] is True
    assert state.plugin_kwargs == {"num_steps": 1}
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, True, True)
    assert (state.in_dataloader, state.active_dataloader) == (False, None)
    assert (state.end_of_dataloader, state.remainder) == (False, -1)
    assert state.dataloader_references == [None]
    assert "sync_gradients=True" in repr(state)


def test_the_state_is_shared_until_it_is_reset() -> None:
    state = GradientState()
    state._set_sync_gradients(False)
    assert GradientState().sync_gradients is False
    GradientState._reset_state()
    assert GradientState._shared_state == {}
    assert not state.initialized
    assert GradientState().sync_gradients is True


def test_a_given_plugin_sets_the_gradient_state() -> None:
    first = GradientState(GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False))
    assert first.plugin_kwargs == {"num_steps": 4, "adjust_scheduler": False}
    assert type(first.plugin_kwargs) is dict
    assert (first.num_steps, first.adjust_scheduler) == (4, False)
    assert GradientState().num_steps == 4
    assert first.plugin_kwargs.get("sync_each_batch", False) is False
    assert GradientState(GradientAccumulationPlugin(num_steps=1)).plugin_kwargs == {"num_steps": 1}
    assert first.num_steps == 1


def test_the_plugin_arguments_may_be_edited() -> None:
    state = GradientState()
    state.plugin_kwargs.update(num_steps=3, sync_with_dataloader=False)
    assert (state.num_steps, state.sync_with_dataloader) == (3, False)


def test_the_innermost_loader_counts() -> None:
    state, training, evaluation = (
        GradientState(),
        Loader(end=False, remainder=3),
        Loader(end=True, remainder=5),
    )
    state._add_dataloader(training)
    assert state.active_dataloader is training
    state._add_dataloader(evaluation)
    assert state.dataloader_references == [None, training, evaluation]
    assert (state.end_of_dataloader, state.remainder) == (True, 5)
    state._remove_dataloader(evaluation)
    assert (state.end_of_dataloader, state.remainder) == (False, 3)
    training.end_of_dataloader = True
    assert state.end_of_dataloader
    state._remove_dataloader(training)
    assert not state.in_dataloader
    state._remove_dataloader(training)
    assert state.dataloader_references == [None]


def test_a_loader_that_was_added_twice_is_removed_once_for_each_call() -> None:
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    state._add_dataloader(loader)
    state._remove_dataloader(loader)
    assert state.dataloader_references == [None, loader]


def test_a_deleted_loader_is_no_longer_active() -> None:
    state, training = GradientState(), Loader(remainder=3)
    state._add_dataloader(training)
    abandoned = Loader(remainder=5)
    state._add_dataloader(abandoned)
    del abandoned
    gc.collect()
    assert state.active_dataloader is training
    assert state.dataloader_references == [None, training]


class Equal(Loader):
    def __eq__(self, other: Any) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_loaders_are_compared_by_identity() -> None:
    state, first, second = GradientState(), Equal(), Equal()
    state._add_dataloader(first)
    state._add_dataloader(second)
    state._remove_dataloader(second)
    assert state.active_dataloader is first


def test_references_can_be_assigned() -> None:
    state, first, second = GradientState(), Loader(), Loader()
    state.dataloader_references = [None, first, second]
    assert state.dataloader_references == [None, first, second]
    assert state.active_dataloader is second


def test_xla_gradients_belong_to_one_pass() -> None:
    state = GradientState()
    state.is_xla_gradients_synced = True
    assert state.is_xla_gradients_synced
    state._set_sync_gradients(True)
    assert not state.is_xla_gradients_synced
