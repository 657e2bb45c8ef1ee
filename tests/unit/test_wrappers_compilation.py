"""torch.compile, whole and by region."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import torch_private
from accelerate.plugins import TorchDynamoPlugin
from accelerate.wrappers import (
    compile_regions,
    compile_regions_deepspeed,
    compile_regions_fsdp2,
    compiler_for,
    extract_model_from_parallel,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)

# What torch says about itself while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Tower(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture(autouse=True)
def _fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch sets these variables while it compiles; a value from here is taken back after the test.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "torchinductor_tests")))
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> tuple[list[int], Callable[..., Any]]:
    """The number of nodes of each graph that was compiled, and the backend that counts them."""
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    return sizes, backend


def test_a_module_that_torch_compile_returned_is_compiled() -> None:
    model = Tower()
    assert not is_compiled_module(model)
    assert is_compiled_module(torch.compile(model, backend="eager"))


def test_repeated_blocks_are_a_list_of_one_class() -> None:
    assert is_repeated_blocks(nn.ModuleList([Block(), Block()]))
    assert is_repeated_blocks(nn.ModuleList([Block(), torch.compile(Block(), backend="eager")]))
    assert not is_repeated_blocks(nn.ModuleList([Block(), nn.Linear(4, 4)]))
    assert not is_repeated_blocks(nn.ModuleList())
    assert not is_repeated_blocks(Tower())
    assert has_repeated_blocks(Tower())
    assert not has_repeated_blocks(Block())


def test_blocks_of_one_class_share_one_compilation(graphs: tuple[list[int], Callable[..., Any]]) -> None:
    sizes, backend = graphs
    model = Tower(blocks=6)
    x = torch.randn(2, 4)
    expected = model(x)
    compiled = compile_regions(model, backend=backend)
    assert compiled is model
    torch.testing.assert_close(compiled(x), expected)
    assert max(sizes) == sizes[-1]
    assert len(sizes) == len(set(sizes))  # since torch 2.15 the layer of torch is compiled, too


def test_regions_keep_the_names_and_train_the_same_parameters() -> None:
    model, plain = Tower(), Tower()
    plain.load_state_dict(model.state_dict())
    names = list(model.state_dict())
    compile_regions(model, backend="eager")
    assert list(model.state_dict()) == names
    x = torch.randn(2, 4)
    model(x).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_model_without_repeated_blocks_is_one_region(graphs: tuple[list[int], Callable[..., Any]]) -> None:
    sizes, backend = graphs
    model = Block()
    assert compile_regions(model, backend=backend) is model
    model(torch.randn(2, 4))
    assert len(sizes) == 1


def test_compiled_regions_are_seen_from_outside() -> None:
    model = Tower()
    assert not has_compiled_regions(model)
    assert has_compiled_regions(compile_regions(model, backend="eager"))
    wrapped = Tower()
    wrapped.last = torch.compile(wrapped.last, backend="eager")
    assert has_compiled_regions(wrapped)


def test_compiled_regions_are_not_compiled_again() -> None:
    model = Tower()
    compile_regions(model, backend="eager")
    calls = [block._compiled_call_impl for block in model.blocks]
    compile_regions(model, backend="eager")
    assert [block._compiled_call_impl for block in model.blocks] == calls


@pytest.mark.parametrize("compiler", [compile_regions_deepspeed, compile_regions_fsdp2])
def test_engines_are_compiled_in_place(compiler: Callable[..., None]) -> None:
    model = Tower()
    assert compiler(model, backend="eager") is None
    assert has_compiled_regions(model)


def test_a_model_with_compiled_regions_can_be_copied_and_pickled() -> None:
    model = Tower()
    compile_regions(model, backend="eager")
    x = torch.randn(2, 4)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), model(x))


def test_without_a_backend_nothing_is_compiled() -> None:
    model = Tower()
    assert compiler_for(TorchDynamoPlugin())(model) is model
    assert not has_compiled_regions(model)


def test_a_plugin_compiles_the_whole_model_once() -> None:
    compile_model = compiler_for(TorchDynamoPlugin(backend="eager"))
    model = compile_model(Tower())
    assert is_compiled_module(model)
    assert compile_model(model) is model
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_a_plugin_compiles_by_region() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = Tower()
    assert compiler_for(plugin)(model) is model
    assert has_compiled_regions(model)
    assert not is_compiled_module(model)


@pytest.mark.slow
def test_inductor_gives_the_same_numbers() -> None:
    model = Block()
    x = torch.randn(3, 4)
    expected = model(x)
    compiled = compiler_for(TorchDynamoPlugin(backend="inductor"))(model)
    torch.testing.assert_close(compiled(x), expected)


def test_a_module_with_the_attribute_of_a_compiled_one_is_not_compiled() -> None:
    planted = nn.Sequential(nn.Linear(2, 2))
    planted.__dict__["_orig_mod"] = nn.Linear(2, 2)
    compiled = torch.compile(planted, backend="eager")
    assert torch_private.uncompiled(planted) is planted
    assert torch_private.uncompiled(compiled) is planted
    assert not is_compiled_module(planted)
    assert not has_compiled_regions(planted)
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is planted
    assert is_repeated_blocks(nn.ModuleList([planted, nn.Sequential()]))
    assert not is_repeated_blocks(nn.ModuleList([planted, nn.Linear(2, 2)]))
