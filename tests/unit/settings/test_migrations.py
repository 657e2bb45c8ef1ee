from __future__ import annotations

from typing import Any

import pytest

from accelerate.settings import retired_variables
from accelerate.settings.migrations import migrate


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"fp16": True}, {"mixed_precision": "fp16"}),
        ({"fp16": False}, {"mixed_precision": "no"}),
        ({"fp16": True, "mixed_precision": "bf16"}, {"mixed_precision": "bf16"}),
        ({"distributed_type": "TPU"}, {"distributed_type": "XLA"}),
        ({"distributed_type": False}, {"distributed_type": "NO"}),
        ({"dynamo_backend": "INDUCTOR"}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
        ({"dynamo_config": {"backend": "EAGER"}}, {"dynamo_config": {"dynamo_backend": "EAGER"}}),
        ({"fp8_config": {"backend": "MSAMP"}}, {"fp8_config": {"backend": "msamp"}}),
        (
            {"fsdp_config": {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}},
            {"fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE"}},
        ),
    ],
)
def test_older_keys_are_migrated_to_the_current_ones(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = dict(old)
    migrated, notes = migrate(old)
    assert migrated == new
    assert notes == ()
    assert old == before


def test_retired_keys_are_dropped_with_a_note() -> None:
    migrated, notes = migrate({"ipex_config": {"ipex": False}, "debug": True})
    assert migrated == {"debug": True}
    assert len(notes) == 1
    assert notes[0].startswith("ipex_config has no effect")


@pytest.mark.parametrize("name", ["ACCELERATE_USE_IPEX", "ACCELERATE_USE_XPU"])
def test_variables_of_older_launchers_are_noted(name: str) -> None:
    (note,) = retired_variables({name: "true"})
    assert note.startswith(f"{name}=true has no effect: ")
    assert retired_variables({name: "false"}) == retired_variables({}) == []


def test_a_file_with_current_keys_is_unchanged() -> None:
    today = {
        "mixed_precision": "no",
        "dynamo_config": {"dynamo_backend": "NO"},
        "fsdp_config": {"fsdp_version": 2},
    }
    assert migrate(today) == (today, ())
