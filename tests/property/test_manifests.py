"""For all manifests, however wrong: reading one gives a well-typed one, or one error of ours."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st

from accelerate.base import CheckpointError
from accelerate.checkpointing import LARGEST, FileRecord, Manifest, manifest

SETTINGS = settings(max_examples=400)
VALID = Manifest(
    {
        "model.safetensors": FileRecord("model.safetensors", 4, "0123456789abcdef"),
        "sub/deep.bin": FileRecord("sub/deep.bin", 0, "fedcba9876543210", 1),
    },
    world_size=2,
    step=3,
    iteration=1,
    created="2026-01-01T00:00:00+00:00",
    run={"sync_gradients": True, "num_steps": 2, "updates": [3], "gradient_order": [[1, 0]]},
)
ODD = st.sampled_from(["", "..", "/a", "a/../b", "a\0", "a\\b", "manifest.json", "files", "seal", "NaN", "é"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD | st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything in nested JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


@st.composite
def mutated(draw: Any) -> Any:
    """A valid manifest in which some values were replaced, removed, renamed or added."""
    content = json.loads(VALID.encode())
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(content)))
        if not place:
            content = draw(st.just(content) | VALUES)
            continue
        owner = content
        for key in place[:-1]:
            owner = owner[key]
        change = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if change == "replace":
            owner[place[-1]] = draw(VALUES)
        elif change == "remove":
            del owner[place[-1]]
        elif isinstance(owner, dict):
            kept = owner.pop(place[-1]) if change == "rename" else draw(VALUES)
            owner[draw(ODD | st.text(max_size=8))] = kept
    return content


def sealed(content: Any, seal: bool) -> Any:
    """Give it the matching checksum, so that it is read."""
    if seal and isinstance(content, dict):
        content.pop(manifest._SEAL, None)
        return {**content, manifest._SEAL: manifest._seal_of(content)}
    return content


def is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= LARGEST


def attempt(folder: Path) -> tuple[Manifest | None, str]:
    try:
        return manifest.read(folder), ""
    except CheckpointError as error:
        return None, str(error)


@SETTINGS
@given(mutated(), st.booleans())
def test_a_manifest_is_well_typed_or_refused(content: Any, seal: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / manifest.NAME).write_text(json.dumps(sealed(content, seal)))
        read, refusal = attempt(Path(folder))
        if read is None:
            assert manifest.NAME in refusal
            assert len(refusal) < 600
            return
        for name, record in read.files.items():
            assert record.name == name
            assert (Path("/folder") / name).resolve().is_relative_to("/folder")
            assert is_count(record.size)
            assert is_count(record.rank)
            assert len(record.checksum) == 16
        assert is_count(read.world_size, 1)
        assert is_count(read.step)
        assert is_count(read.epoch)
        assert read.iteration is None or is_count(read.iteration)
        assert all(isinstance(text, str) for text in (read.created, read.software, read.torch))
        assert all(map(is_count, read.run.get("updates", [])))
        assert all(is_count(place) for order in read.run.get("gradient_order", []) for place in order)
        assert isinstance(read.run.get("sync_gradients", True), bool)
        assert manifest.problems(Path(folder), read, deep=True) != [] or not read.files
        assert manifest.read(Path(folder)) == read
