"""Programs that FSDP 1 trains as one process, or refuses on the first batch: added modules, norms, GANs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import StateError
from accelerate.utils import GradientAccumulationPlugin

Run = Callable[..., list[Any]]
FLAT, ORIGINAL = False, True


def accelerator_of(has_originals: bool, **options: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=has_originals)
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def layers(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    parts = [
        part for sizes in zip(widths, widths[1:], strict=False) for part in (nn.Linear(*sizes), nn.Tanh())
    ]
    return nn.Sequential(*parts[:-1])


def batches(*widths: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(8, width, generator=generator) for width in widths) for _ in range(8)]


def change(kind: str, model: Any, optimizer: Any) -> None:
    """Changes what a step uses, as programs do that have whole gradients."""
    trained = [p for p in model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in trained]).norm()
    if kind == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    elif kind == "clipped alone":
        for parameter in trained:
            nn.utils.clip_grad_norm_(parameter, 1e-2)
    elif kind == "rate":
        optimizer.param_groups[0]["lr"] = 0.1 / float(norm)
    elif kind == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.1 / float(norm)
    elif kind == "perturbed":  # sharpness-aware minimization
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(parameter.grad, alpha=0.5 / float(norm))
    elif kind == "halved":
        for parameter in trained:
            parameter.grad *= 0.5


def train(kind: str, has_originals: bool) -> str:
    """Trains on different batches of the ranks, and returns the error, or none."""
    accelerator = accelerator_of(has_originals)
    model: Any = layers(5, 12, 12, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    head = nn.Linear(4, 4)
    if kind == "added":
        accelerator.unwrap_model(model).head = head
    if kind in ("added", "group"):
        optimizer.add_param_group({"params": list(head.parameters())})
    (x,) = batches(5)[accelerator.process_index]
    labels = torch.arange(8) % 4
    try:
        if kind == "frozen":
            accelerator.unwrap_model(model)[2].requires_grad_(True)  # changes nothing
            accelerator.unwrap_model(model)[2].requires_grad_(False)
        for _ in range(2):
            accelerator.backward(cross_entropy(head(model(x)), labels))
            change(kind, model, optimizer)
            if kind == "perturbed":
                accelerator.backward(cross_entropy(head(model(x)), labels))
            optimizer.step()
            optimizer.zero_grad()
    except StateError as error:
        return str(error)
    return ""


REFUSED = {
    "added": "head.weight, head.bias. They did not exist when the model was prepared",
    "group": "They belong to no prepared model",
    "clipped": "Ranks with parts of a model have scaled their gradients by different factors",
    "clipped alone": "Ranks with parts of a model have scaled their gradients by different factors",
    "perturbed": "Ranks with parts of a model have changed their weights by different multiples",
    "rate": "Ranks have different values of 'lr' in their parameter groups after step 1 of SGD",
    "decay": "Ranks have different values of 'weight_decay' in their parameter groups after step 1 of SGD",
}


def test_what_each_rank_computes_from_its_shards_is_refused(run: Run) -> None:
    cases = [(kind, has_originals) for kind in REFUSED for has_originals in (FLAT, ORIGINAL)]
    for found in run(call_for_each, train, cases):
        for (kind, has_originals), text in zip(cases, found, strict=True):
            assert REFUSED[kind] in text, (kind, has_originals)


def test_equal_changes_are_accepted_and_freezing_a_part_of_a_flat_parameter_is_not(run: Run) -> None:
    cases = [("halved", FLAT), ("halved", ORIGINAL), ("frozen", ORIGINAL), ("frozen", FLAT)]
    for *accepted, frozen in run(call_for_each, train, cases):
        assert accepted == ["", "", ""]
        assert "requires_grad_() of 2 in a unit of Sequential has no effect" in frozen


def train_with_a_shared_layer(is_sharded: bool) -> list[float]:
    """Train a model that has the same layer at two positions of a list, and return its losses."""
    model: Any = layers(4, 4, 4, 4)
    model.append(model[2])
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if is_sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            use_orig_params=True,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for inputs, targets in batches(4, 4):
        loss = nn.functional.mse_loss(model(inputs), targets)
        losses.append(float(loss.detach()))
        accelerator.backward(loss) if is_sharded else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_layer_with_two_names_trains_as_on_one_process(run: Run) -> None:
    expected = pytest.approx(train_with_a_shared_layer(False), rel=1e-5)
    assert run(train_with_a_shared_layer, True) == [expected] * 2


def play(kind: str, steps: int, options: dict[str, Any] | None) -> list[float]:
    """Trains a generator and a discriminator, and returns their losses, in plain torch without options."""
    accelerator = None
    if options is not None:
        plugin = GradientAccumulationPlugin(steps, sync_each_batch=options.pop("early", False))
        accelerator = accelerator_of(**options, gradient_accumulation_plugin=plugin)
    makes: Any = layers(4, 16, 6, seed=1)
    judges: Any = layers(6, 16, 1, seed=2)
    makers, judgers = (torch.optim.SGD(each.parameters(), 0.1, 0.9) for each in (makes, judges))
    if accelerator is not None:
        makes, judges, makers, judgers = accelerator.prepare(makes, judges, makers, judgers)

    def window(*models: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext() if accelerator is None else accelerator.accumulate(*models)

    def backward(loss: torch.Tensor) -> None:
        (loss / steps).backward() if accelerator is None else accelerator.backward(loss)

    losses = []
    for index, batch in enumerate(batches(4, 6)):
        first, last = index % steps == 0, index % steps == steps - 1
        part = slice(None) if accelerator is None else slice(accelerator.process_index, None, 2)
        noise, real = (tensor[part] for tensor in batch)
        ones = torch.ones(len(noise), 1)
        with window(judges, makes) if kind == "together" else window(judges):
            if kind == "cleared" and (first or accelerator is not None):
                judges.zero_grad()
            loss = binary_cross_entropy_with_logits(judges(real), ones)
            loss = loss + binary_cross_entropy_with_logits(judges(makes(noise).detach()), 0 * ones)
            backward(loss)
            losses.append(loss)
            if kind != "together" and (last or accelerator is not None):
                judgers.step()
            if kind == "apart" and (last or accelerator is not None):
                judgers.zero_grad()
            if kind == "together":
                judges.requires_grad_(False)
                losses.append(binary_cross_entropy_with_logits(judges(makes(noise)), ones))
                backward(losses[-1])
                judges.requires_grad_(True)
                if last or accelerator is not None:
                    for optimizer in (judgers, makers):
                        optimizer.step()
                        optimizer.zero_grad()
        if kind == "apart":
            with window(makes):
                judges.requires_grad_(False)
                losses.append(binary_cross_entropy_with_logits(judges(makes(noise)), ones))
                backward(losses[-1])
                judges.requires_grad_(True)
                if last or accelerator is not None:
                    makers.step()
                    makers.zero_grad()
    values = torch.stack([loss.detach() for loss in losses])
    return (values if accelerator is None else accelerator.reduce(values, "mean")).tolist()


@pytest.mark.parametrize("has_originals", [FLAT, ORIGINAL])
def test_models_that_are_frozen_in_turn_train_as_on_one_process(run: Run, has_originals: bool) -> None:
    cases = [
        (kind, steps, {"has_originals": has_originals, "early": early})
        for kind, steps in [("together", 1), ("together", 2), ("apart", 2), ("cleared", 2)]
        for early in (False, True)
    ]
    for found in run(call_for_each, play, cases):
        for (kind, steps, options), losses in zip(cases, found, strict=True):
            assert losses == pytest.approx(play(kind, steps, None), abs=1e-5), (kind, steps, options)
