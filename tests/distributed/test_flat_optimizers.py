"""FSDP 1 says which optimizers train differently on flat parameters, and what it cannot save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import CheckpointError
from accelerate.state import AcceleratorState, GradientState

Run = Callable[..., list[Any]]


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Blocks(torch.optim.Optimizer):
    """Keeps a state of three numbers, and one that belongs to no parameter."""

    unnamed = False

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["block"] = torch.ones(3)
        if self.unnamed:
            self.state["run"] = {"steps": 1}  # type: ignore[index]


def train(make: Callable[[Any], Any], kind: str, attributes: dict[str, Any]) -> tuple[list[str], str]:
    """Returns the warnings of `prepare`, and the error of `save_state`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type=kind)
    accelerator = Accelerator(fsdp_plugin=plugin)
    log = Log()
    logging.getLogger("accelerate").addHandler(log)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = make(model.parameters())
    vars(optimizer).update(attributes)
    model, optimizer = accelerator.prepare(model, optimizer)
    logging.getLogger("accelerate").removeHandler(log)
    accelerator.backward(model(torch.ones(2, 6)).sum())
    optimizer.step()
    try:
        accelerator.save_state("saved")
    except CheckpointError as error:
        return log.texts, str(error)
    return log.texts, ""


def train_all() -> list[Any]:
    return [
        train(lambda parameters: torch.optim.AdamW(parameters), "FULL_STATE_DICT", {}),
        train(lambda parameters: torch.optim.Adafactor(parameters), "SHARDED_STATE_DICT", {}),
        train(
            lambda parameters: torch.optim.Adafactor(parameters), "FULL_STATE_DICT", {"whole_matrices": False}
        ),
        train(lambda parameters: Blocks(parameters, {"lr": 0.1}), "SHARDED_STATE_DICT", {}),
        train(lambda parameters: Blocks(parameters, {"lr": 0.1}), "FULL_STATE_DICT", {"unnamed": True}),
    ]


def test_optimizers_that_do_not_fit_flat_parameters(run: Run) -> None:
    results = run(train_all)
    assert results[0][1][0]
    for adamw, adafactor, accepted, blocks, unnamed in results:
        assert adamw == ([], "")
        assert accepted == ([], "")
        assert len(adafactor[0]) <= 1  # on rank 0
        assert all("Adafactor computes the update of a value from others" in text for text in adafactor[0])
        assert not adafactor[1]
        assert "'block' of Blocks is not element-wise" in blocks[1]
        assert "belongs to no parameter (run), which FSDP 1 cannot save" in unnamed[1]
