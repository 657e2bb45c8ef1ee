"""What steps report: combined over micro-batches, copies and stages, and logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.strategies.megatron import library

logger = get_logger(__name__)


LOGITS = "logits"
_NUMBER = " (batches)"
_SUM_AND_NUMBER = 2

Report = dict[str, Tensor]


def combine(reports: list[Report], groups: Any) -> dict[str, Any]:
    """Return the report of a step from those of its micro-batches.

    Pairs of sum and number become the mean over all copies of the model, single values the mean over
    micro-batches, and logits stay one after the other.

    Args:
        reports: of the micro-batches; none on stages without the head.
    """
    if not reports:
        return {}
    return {name: _combine(name, [report[name] for report in reports], groups) for name in reports[0]}


def _combine(name: str, values: list[Tensor], groups: Any) -> Tensor:
    if name == LOGITS:
        return torch.cat(values)
    stacked = torch.stack([value.reshape(-1).float() for value in values])
    if stacked.shape[1] != _SUM_AND_NUMBER:
        return stacked.mean()
    pair = stacked.sum(0)
    torch.distributed.all_reduce(pair, group=groups.get_data_parallel_group(with_context_parallel=True))
    return pair[0] / pair[1].clamp(min=1)


def share_outputs(
    report: dict[str, Any], groups: Any, device: torch.device, with_logits: bool
) -> tuple[Tensor, Tensor | None]:
    """Return loss and logits of the last stage of a pipeline on all stages; called on all ranks."""
    losses = [value for name, value in report.items() if name != LOGITS]
    loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
    logits = report.get(LOGITS)
    if groups.get_pipeline_model_parallel_world_size() == 1:
        return loss, logits
    last, group = groups.get_pipeline_model_parallel_last_rank(), groups.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(loss, last, group=group)
    if not with_logits:
        return loss, None
    spec = [None if logits is None else (logits.shape, logits.dtype)]
    torch.distributed.broadcast_object_list(spec, last, group=group)
    shape, dtype = spec[0]  # type: ignore[misc]  # the last stage has them
    logits = torch.empty(shape, dtype=dtype, device=device) if logits is None else logits.contiguous()
    torch.distributed.broadcast(logits, last, group=group)
    return loss, logits


class Losses:
    """Sums what steps report and logs it, on the last rank, where the losses are."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.writer = library.training("global_vars").get_tensorboard_writer()
        self.totals: dict[str, Any] = {}

    def add(self, totals: dict[str, Any], report: dict[str, Any]) -> None:
        """Add a report to sums."""
        for name, value in report.items():
            if name != LOGITS:
                totals[name] = totals.get(name, 0.0) + value.detach()
                totals[name + _NUMBER] = totals.get(name + _NUMBER, 0) + 1

    def log_step(self, engine: Any, report: dict[str, Any], zeros: Any) -> dict[str, Any]:
        """Log a step of training at the interval of the run; return the sums since the last one logged."""
        self.add(self.totals, report)
        iteration = engine.iteration
        if self.writer is not None and iteration % self.args.tensorboard_log_interval == 0:
            self._write_step(engine, report, zeros)
        if iteration % self.args.log_interval:
            return self.totals
        self._log(f"iteration {iteration}", means(self.totals))
        if engine.report_memory_flag and torch.cuda.is_available():
            library.training("utils").report_memory(f"(after {iteration} iterations)")
            engine.report_memory_flag = False
        self.totals = {}
        return self.totals

    def _write_step(self, engine: Any, report: dict[str, Any], zeros: Any) -> None:
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        values = {
            **{name: float(value) for name, value in report.items() if name != LOGITS},
            "learning-rate": rates[0] if rates else None,
            "grad-norm": engine.grad_norm,
            "num-zeros": zeros,
        }
        if getattr(self.args, "log_loss_scale_to_tensorboard", False):
            values["loss-scale"] = float(engine.optimizer.get_loss_scale())
        for name, value in values.items():
            if value is not None:
                self.writer.add_scalar(name, value, engine.iteration)

    def log_evaluation(self, iteration: int, totals: dict[str, Any]) -> None:
        """Log the means of an evaluation, and their perplexity."""
        values = means(totals)
        self._log(f"evaluation after iteration {iteration}", values)
        if self.writer is None:
            return
        for name, value in values.items():
            self.writer.add_scalar(f"{name} validation", value, iteration)
            if getattr(self.args, "log_validation_ppl_to_tensorboard", False):
                self.writer.add_scalar(f"{name} validation ppl", perplexity(value), iteration)

    def _log(self, when: str, values: dict[str, float]) -> None:
        if values:
            text = ", ".join(
                f"{name} {value:.6g} (ppl {perplexity(value):.6g})" for name, value in values.items()
            )
            logger.info(f"{when}: {text}", main_process_only=False)


def means(totals: dict[str, Any]) -> dict[str, float]:
    """Return the means of sums."""
    names = [name for name in totals if not name.endswith(_NUMBER)]
    return {name: float(totals[name]) / totals[name + _NUMBER] for name in names}


def perplexity(loss: float) -> float:
    """Return the exponential of a loss; at most e^20, so that it can be plotted."""
    return math.exp(min(20.0, loss))


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the means of losses over all copies of the model; called on all ranks of a stage.

    Args:
        losses: 0-d tensors.

    Returns:
        As many values, without gradients.
    """
    group = library.core("parallel_state").get_data_parallel_group(with_context_parallel=True)
    averaged = torch.stack([loss.detach().reshape(()).float() for loss in losses])
    torch.distributed.all_reduce(averaged, group=group)
    return averaged / torch.distributed.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return the values of all copies of the model, each once, along the first dimension.

    Ranks that make up one copy have the same values, and all of them get the result.

    Args:
        tensor: nested tensors; 0-d ones count as one row.
    """
    group = library.core("parallel_state").get_data_parallel_group()

    def gather(leaf: Tensor) -> Tensor:
        rows = leaf.detach().reshape(1) if leaf.ndim == 0 else leaf.detach().contiguous()
        gathered = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, rows, group=group)
        return torch.cat(gathered)

    return recursively_apply(gather, tensor, error_on_other_type=True)
