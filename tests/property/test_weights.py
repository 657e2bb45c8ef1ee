"""For all state dicts: weights that are split into files are loaded, each name with its values."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn

from accelerate import load_checkpoint_in_model
from accelerate.checkpointing import find_shards, save_sharded
from accelerate.weights import StoredWeights, find_tied_parameters

SETTINGS = settings(max_examples=120)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
SIZES = st.sampled_from([1, 40, 200, "1KB", "10GB"])
CPU = torch.device("cpu")


class Bag(nn.Module):
    """Parameters under any names, of which some are one."""


@st.composite
def models(draw: Any) -> Bag:
    """A model whose modules share some of their parameters."""
    pool = [nn.Parameter(torch.rand(draw(SHAPES)).to(draw(DTYPES))) for _ in range(draw(st.integers(1, 5)))]
    bag = Bag()
    for number in range(draw(st.integers(1, 8))):
        inner = Bag()
        inner.weight = draw(st.sampled_from(pool))
        if draw(st.booleans()):
            inner.register_buffer("scale", torch.rand(draw(SHAPES)))
        setattr(bag, f"m{number}", inner)
    return bag


@SETTINGS
@given(models(), SIZES, st.booleans())
def test_sharded_weights_load_as_they_were_saved(model: Bag, size: Any, safe: bool) -> None:
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        written = save_sharded(state, Path(folder), size, safe)
        assert find_shards(Path(folder)) == sorted(written)
        weights = StoredWeights.open(written)
        stored = set(weights.files)
        assert stored == set(state)
        assert all(torch.equal(weights.read(name, CPU), state[name]) for name in stored)
        if isinstance(size, int) and safe:
            for path in written:
                content = load_file(path)
                total = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
                assert total <= size or len(content) == 1, "only a tensor larger than a file exceeds its size"
        index = next(Path(folder).glob("*.index.json"), None)
        assert (index is None) == (len(written) == 1)
        if index is not None:
            named = set(json.loads(index.read_text())["weight_map"])
            tied = find_tied_parameters(model) if safe else []
            assert named <= stored
            assert stored - named == {name for group in tied for name in group} - named
            assert all(named & set(group) for group in tied), "one name of each tensor at least"


def empty(model: Bag) -> Bag:
    """The same model without values, tied as it is."""
    parameters = {id(each): nn.Parameter(each.detach().to("meta")) for each in model.parameters()}
    made = Bag()
    for name, inner in model.named_children():
        other = Bag()
        other.weight = parameters[id(inner.weight)]
        for key, buffer in inner.named_buffers():
            other.register_buffer(key, buffer.to("meta"))
        setattr(made, name, other)
    return made


@SETTINGS
@given(models(), SIZES, st.booleans(), st.booleans(), st.booleans())
def test_a_model_is_loaded_with_its_tied_weights(
    model: Bag, size: Any, safe: bool, mapped: bool, torn: bool
) -> None:
    """Also one that lost its ties on the way to the meta device gets all values."""
    with tempfile.TemporaryDirectory() as folder:
        save_sharded(model.state_dict(), Path(folder), size, safe)
        expected, tied = model.state_dict(), find_tied_parameters(model)
        other = copy.deepcopy(model).to("meta") if torn else empty(model)
        load_checkpoint_in_model(other, folder, {"": "cpu"} if mapped else None, strict=True)
        found = other.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert torn or find_tied_parameters(other) == tied
