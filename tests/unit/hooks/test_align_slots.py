from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from accelerate.hooks import Slot, find_slots

CPU, META = torch.device("cpu"), torch.device("meta")


def make() -> tuple[nn.Linear, Slot, SimpleNamespace]:
    module = nn.Linear(2, 2, bias=False)
    source = SimpleNamespace(weights_map={"weight": torch.ones(2, 2)})
    (slot,), _ = find_slots(module, source, with_buffers=False, with_inner=False)
    slot.empty = nn.Parameter(torch.empty(2, 2, device="meta"))
    slot.clear()
    return module, slot, source


def test_values_that_stay_in_memory_are_wrapped_once() -> None:
    module, slot, source = make()
    slot.load(CPU)
    first = module.weight
    slot.clear()
    slot.load(CPU)
    assert module.weight is first
    slot.clear()
    source.weights_map["weight"].data = torch.full((2, 2), 2.0)
    slot.load(CPU)
    assert torch.equal(module.weight, torch.full((2, 2), 2.0))
    slot.clear()
    source.weights_map["weight"] = torch.zeros(2, 2)
    slot.load(CPU)
    assert torch.equal(module.weight, torch.zeros(2, 2))
    slot.clear()
    slot.fill(slot.read(CPU), CPU)
    slot.clear()
    assert slot.filled is None


def test_changes_to_the_empty_tensor_count() -> None:
    module, slot, _ = make()
    slot.load(CPU)
    slot.clear()
    module.requires_grad_(False)
    slot.load(CPU)
    assert not module.weight.requires_grad
    slot.clear()
    module.half()
    slot.load(CPU)
    assert module.weight.dtype == torch.float16
    slot.clear()
    module.weight = nn.Parameter(torch.empty(2, 2, device="meta", dtype=torch.float64))
    slot.load(CPU)
    assert module.weight.dtype == torch.float64


def test_integers_keep_their_dtype() -> None:
    module = nn.BatchNorm1d(2)
    source = SimpleNamespace(weights_map={"num_batches_tracked": torch.tensor(7, dtype=torch.int32)})
    slots, stay = find_slots(module, source, with_buffers=True, with_inner=False)
    slot = next(slot for slot in slots if slot.key == "num_batches_tracked")
    assert slot.read(CPU).dtype == torch.int32
    assert not stay


def test_tied_tensors_share_a_slot_and_others_stay() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].weight = module[0].weight
    module[2].register_buffer("steps", torch.zeros(1), persistent=False)
    slots, stay = find_slots(module, None, with_buffers=True, with_inner=True)
    assert [slot.name for slot in slots][:3] == ["0.weight", "0.bias", "1.bias"]
    assert list(stay) == ["2.steps"]
    assert [(tensors is module[1]._parameters, key) for tensors, key in slots[0].tied] == [(True, "weight")]
    slots[0].empty = nn.Parameter(torch.empty(2, 2, device="meta"))
    slots[0].clear()
    assert module[1].weight is module[0].weight is slots[0].empty
    slots[0].fill(torch.ones(2, 2), CPU)
    assert module[1].weight is module[0].weight
    _, stay = find_slots(module, None, with_buffers=False, with_inner=True)
    assert set(stay) == {"2.running_mean", "2.running_var", "2.num_batches_tracked", "2.steps"}
    assert len(find_slots(module, None, False, with_inner=False)[0]) == 0


def test_parameters_keep_their_attributes() -> None:
    module, slot, _ = make()
    slot.empty.note = 7  # type: ignore[attr-defined]
    slot.fill(slot.read(CPU), CPU)
    assert module.weight.note == 7  # type: ignore[attr-defined]
