"""Wrappers are removed, and nothing else changes."""

from __future__ import annotations

import pickle
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate.ops import convert_outputs_to_fp32
from accelerate.state import process_group
from accelerate.wrappers import extract_model_from_parallel, is_compiled_module, is_peft_model


class Doubling:
    """What mixed precision puts on a model: a callable that can be taken off again."""

    def __init__(self, module: nn.Module) -> None:
        self.original = module.forward

    def __call__(self, *args: Any) -> Any:
        return self.original(*args) * 2

    def restore(self, module: nn.Module) -> None:
        del module.__dict__["forward"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def by_function(model: nn.Module) -> Any:
    return convert_outputs_to_fp32(model.forward)


def by_function_twice(model: nn.Module) -> Any:
    return convert_outputs_to_fp32(convert_outputs_to_fp32(model.forward))


def by_method(model: nn.Module) -> Any:
    return types.MethodType(convert_outputs_to_fp32(type(model).forward), model)


@pytest.fixture(autouse=True)
def _inductor_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch sets this variable itself when it is not set, which would be a leak of the test.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "torchinductor_tests")))


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.fixture
def _one_process_group() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    process_group.close_group()


@pytest.mark.parametrize("keep_fp32", [True, False])
@pytest.mark.parametrize("keep_compiled", [True, False])
@pytest.mark.parametrize("recursive", [True, False])
def test_a_bare_model_is_returned_unchanged(
    model: nn.Module, keep_fp32: bool, keep_compiled: bool, recursive: bool
) -> None:
    children = list(model.children())
    assert extract_model_from_parallel(model, keep_fp32, keep_compiled, recursive) is model
    assert list(model.children()) == children


@pytest.mark.usefixtures("_one_process_group")
def test_ddp_is_unwrapped(model: nn.Module) -> None:
    assert extract_model_from_parallel(DistributedDataParallel(model)) is model


def test_data_parallel_is_unwrapped(model: nn.Module) -> None:
    assert extract_model_from_parallel(nn.DataParallel(model)) is model


def test_a_compiled_model_is_kept_or_unwrapped(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model


@pytest.mark.usefixtures("_one_process_group")
def test_a_compiled_wrapper_leaves_a_compiled_model_and_stays_as_it_was(model: nn.Module) -> None:
    wrapper = DistributedDataParallel(model)
    outer = torch.compile(wrapper, backend="eager")
    inner = extract_model_from_parallel(outer)
    assert is_compiled_module(inner)
    assert inner._orig_mod is model
    assert outer._orig_mod is wrapper
    x = torch.randn(3, 2)
    torch.testing.assert_close(inner(x), model(x))
    assert extract_model_from_parallel(outer, keep_torch_compile=False) is model


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_compiled_before_it_was_wrapped_is_that_very_object(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    wrapped = DistributedDataParallel(compiled)
    assert extract_model_from_parallel(wrapped) is compiled
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is model


@pytest.mark.parametrize("compiled", [True, False])
def test_the_forward_of_mixed_precision_is_kept_or_removed(model: nn.Module, compiled: bool) -> None:
    x = torch.randn(3, 2)
    expected = model(x)
    model.forward = Doubling(model)
    held = torch.compile(model, backend="eager") if compiled else model
    assert extract_model_from_parallel(held) is held
    torch.testing.assert_close(model(x), expected * 2)
    assert extract_model_from_parallel(held, keep_fp32_wrapper=False, keep_torch_compile=False) is model
    assert "forward" not in vars(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("wrap", [by_function, by_function_twice, by_method], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("compute", ["no", "bf16"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_float32_wrapper_of_the_user_is_kept_or_removed(
    states: None, wrap: Callable[[nn.Module], Any], compute: str, kept: bool
) -> None:
    model = Inner()
    original = model.forward
    model.forward = wrap(model)  # type: ignore[method-assign]
    if wrap is by_method:
        model._original_forward = original  # type: ignore[assignment]
    Accelerator(cpu=True, mixed_precision=compute).prepare(model)
    bare = extract_model_from_parallel(model, keep_fp32_wrapper=kept)
    assert bare is model
    assert ("forward" in vars(bare)) == kept
    assert kept or "_original_forward" not in vars(bare)
    copied = pickle.loads(pickle.dumps(bare))
    assert copied(torch.ones(1, 2)).dtype == torch.float32


def test_a_forward_that_a_user_put_on_an_instance_stays(model: nn.Module) -> None:
    mine = model.forward = lambda x: x
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert model.forward is mine


@pytest.mark.usefixtures("_one_process_group")
def test_modules_inside_are_unwrapped_on_request() -> None:
    leaf = nn.Linear(2, 2)
    model = nn.Sequential(DistributedDataParallel(leaf), nn.ReLU())
    assert extract_model_from_parallel(model) is model
    assert model[0] is not leaf
    assert extract_model_from_parallel(model, recursive=True) is model
    assert model[0] is leaf


def test_wrappers_of_other_libraries_are_removed_with_recursive() -> None:
    wrapper = Inner()
    assert extract_model_from_parallel(wrapper) is wrapper
    assert extract_model_from_parallel(wrapper, recursive=True) is wrapper.module


def test_a_child_called_module_among_others_is_no_wrapper() -> None:
    model = Inner()
    model.head = nn.Linear(2, 2)
    assert extract_model_from_parallel(model, recursive=True) is model


def test_a_compiled_child_is_unwrapped_with_recursive() -> None:
    leaf = nn.Linear(2, 2)
    model = nn.Sequential(torch.compile(leaf, backend="eager"))
    assert is_compiled_module(extract_model_from_parallel(model, recursive=True)[0])
    assert extract_model_from_parallel(model, keep_torch_compile=False, recursive=True)[0] is leaf


def test_peft_models_are_recognised_through_wrappers(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    class PeftModel(nn.Linear):
        pass

    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert not is_peft_model(model)
    peft = types.ModuleType("peft")
    peft.PeftModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", peft)
    assert not is_peft_model(model)
    assert is_peft_model(nn.DataParallel(PeftModel(2, 2)))
    assert is_peft_model(torch.compile(PeftModel(2, 2), backend="eager"))
