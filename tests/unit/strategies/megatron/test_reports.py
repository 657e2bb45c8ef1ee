"""Reports of micro-batches become those of a step, and are logged."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import PartialState
from accelerate.strategies.megatron import LossLog, broadcast_outputs, combine_reports, means

from .conftest import Fake


class Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.rows.append((name, float(value), step))


@pytest.fixture
def groups(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    return sys.modules["megatron.core.parallel_state"]


def test_pairs_are_means_over_tokens_and_values_over_micro_batches(groups: Any) -> None:
    reports = [
        {"lm loss": torch.tensor([6.0, 2.0]), "sop loss": torch.tensor(1.0), "logits": torch.zeros(1, 2)},
        {"lm loss": torch.tensor([2.0, 6.0]), "sop loss": torch.tensor(3.0), "logits": torch.ones(1, 2)},
    ]
    combined = combine_reports(reports, groups)
    assert (float(combined["lm loss"]), float(combined["sop loss"])) == (1.0, 2.0)
    assert combined["logits"].tolist() == [[0, 0], [1, 1]]
    assert combine_reports([], groups) == {}


@pytest.mark.parametrize("is_last", [True, False])
def test_stages_receive_the_outputs_of_the_last(
    groups: Any, fake: Fake, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    fake.sizes["pipeline"] = 2
    sent = {"loss": torch.tensor(3.0), "logits": torch.ones(2, 3)}

    def broadcast(tensor: torch.Tensor, source: int, group: Any) -> None:
        tensor.copy_(sent["loss"] if tensor.ndim == 0 else sent["logits"])

    def broadcast_object_list(objects: list[Any], source: int, group: Any) -> None:
        objects[0] = {"logits": (sent["logits"].shape, sent["logits"].dtype)}

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast_object_list)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0 if is_last else 1)
    report = {"lm loss": sent["loss"], "logits": sent["logits"]} if is_last else {}
    loss, logits = broadcast_outputs(report, groups, torch.device("cpu"), True)
    assert float(loss) == 3.0
    assert logits is not None
    assert logits.tolist() == sent["logits"].tolist()
    assert broadcast_outputs(report, groups, torch.device("cpu"), False)[1] is None


def engine(iteration: int) -> Any:
    groups = [{"lr": 0.25}]
    optimizer = SimpleNamespace(param_groups=groups, get_loss_scale=lambda: torch.tensor(2.0))
    return SimpleNamespace(iteration=iteration, optimizer=optimizer, grad_norm=0.5, report_memory_flag=True)


def test_steps_are_logged_in_their_turn(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.writer = Writer()
    PartialState(cpu=True)
    args = Namespace(log_interval=2, tensorboard_log_interval=1, log_loss_scale_to_tensorboard=True)
    losses = LossLog(args)
    report = {"lm loss": torch.tensor(2.0)}
    with caplog.at_level("INFO"):
        assert losses.log_step(engine(1), report, None) != {}
        assert "iteration" not in caplog.text
        assert losses.log_step(engine(2), {"lm loss": torch.tensor(4.0)}, 3) == {}
    assert "iteration 2: lm loss 3 (ppl 20.0855)" in caplog.text
    assert ("lm loss", 2.0, 1) in fake.writer.rows
    assert ("learning-rate", 0.25, 2) in fake.writer.rows
    assert ("loss-scale", 2.0, 2) in fake.writer.rows
    assert ("num-zeros", 3.0, 2) in fake.writer.rows
    assert fake.called("report_memory") == [("report_memory", "(after 2 iterations)")]


def test_evaluations_are_logged(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.writer = Writer()
    PartialState(cpu=True)
    losses = LossLog(Namespace(log_validation_ppl_to_tensorboard=True))
    totals: dict[str, Any] = {}
    for value in (1.0, 3.0):
        losses.add(totals, {"lm loss": torch.tensor(value), "logits": torch.zeros(1)})
    assert means(totals) == {"lm loss": 2.0}
    with caplog.at_level("INFO"):
        losses.log_evaluation(7, totals)
    assert "evaluation after iteration 7: lm loss 2" in caplog.text
    assert fake.writer.rows[0] == ("lm loss validation", 2.0, 7)
    assert fake.writer.rows[1][1] == pytest.approx(math.exp(2.0))
