"""What steps of Megatron-LM read and report: loaders, batches on the ranks that share them, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import wrong_value
from accelerate.data_loader import kept_settings
from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.state import AcceleratorState
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.library import build_datasets
from accelerate.strategies.megatron.steps import IGNORED

logger = get_logger(__name__)

_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


class MegatronLMDummyDataLoader:
    """A placeholder for data that Megatron-LM reads itself: pass three, for training, validation and test.

    Args:
        **dataset_kwargs: arguments of Megatron-LM about data: `data_path`, `splits_string`, `seq_length`,
            `micro_batch_size`, and any others.

    Attributes:
        dataset_args: those arguments.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dict(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """Hand the arguments to the plugin of the run."""
        plugin = AcceleratorState().megatron_lm_plugin
        args = dict(self.dataset_args)
        if "splits_string" in args:
            args["split"] = args.pop("splits_string")
        args.update({name: [args[name]] for name in _LISTS if isinstance(args.get(name), str)})
        if args.get("seq_length") is not None:
            plugin.seq_length = args["seq_length"]
        plugin.dataset_args = args
        plugin.megatron_lm_default_args.update(args, megatron_dataset_flag=True)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function that builds the three datasets."""
        plugin = accelerator.state.megatron_lm_plugin
        provider: Any = plugin.custom_megatron_datasets_provider_function or build_datasets
        provider.is_distributed = True  # Megatron-LM asks for it
        return provider  # type: ignore[no-any-return]

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Return what training, validation and test read; None where this process reads nothing."""
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        args = library.get_args()
        consumed = getattr(args, "consumed_samples", None) or [0, 0]
        for index, name in enumerate(("consumed_train_samples", "consumed_valid_samples")):
            setattr(args, name, getattr(args, name, 0) or consumed[index])
        train, valid, test = library.training("training").build_train_valid_test_data_iterators(provider)
        return train, valid, test


class MegatronBatches:
    """Batches of Megatron-LM's datasets, each with the micro-batches of one step; empty where this process
    reads no micro-batches, as the engine fetches them from the rank that reads."""

    _is_accelerate_prepared = True

    def __init__(self, source: Iterator[Mapping[str, Any]] | None, num_micro_batches: int) -> None:
        self.source = source
        self.num_micro_batches = num_micro_batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.source is None:
            return {}
        batches = [next(self.source) for _ in range(self.num_micro_batches)]
        names = [name for name, value in batches[0].items() if isinstance(value, Tensor)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in names}


class RankGrid:
    """Coordinates of this process in the groups of Megatron-LM: the part of `torch.distributed.DeviceMesh`
    that says which ranks share a batch. A mesh would open the same groups a second time."""

    mesh_dim_names = ("pp", "dp", "cp", "tp")

    def __init__(self) -> None:
        groups = library.core("parallel_state")
        names = ("pipeline_model", "data", "context", "tensor_model")
        sizes = [getattr(groups, f"get_{name}_parallel_world_size")() for name in names]
        self._coordinate = [getattr(groups, f"get_{name}_parallel_rank")() for name in names]
        self.mesh = torch.empty(sizes, dtype=torch.int8)

    def size(self) -> int:
        return self.mesh.numel()

    def get_coordinate(self) -> list[int]:
        return self._coordinate


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Return a loader whose batches are those of one step, sharded between copies of the model.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        dataloader: torch's, or a placeholder for Megatron-LM's data.

    Returns:
        A prepared loader; three of them, for training, validation and test, for a
        placeholder.
    """
    if not isinstance(dataloader, MegatronLMDummyDataLoader):
        return accelerator.prepare_data_loader(dataloader)
    number = int(accelerator.state.megatron_lm_plugin.num_micro_batches)
    sources = dataloader.build_train_valid_test_data_iterators(accelerator)
    return tuple(MegatronBatches(source, number) for source in sources)


def with_batches_of(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader like another one, with larger batches."""
    if loader.batch_size == size:
        return loader
    refuse_batch_sampler(loader)
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    kept = {"sampler": sampler, "drop_last": loader.drop_last, **kept_settings(loader)}
    return DataLoader(loader.dataset, batch_size=size, **kept)


def refuse_batch_sampler(loader: DataLoader[Any]) -> None:
    """Raise where a batch sampler of the user's own makes the batches."""
    if loader.batch_size is None:
        raise wrong_value(
            "batch_size",
            None,
            "this loader does not say how many samples its batches have, and a step takes "
            "num_micro_batches micro-batches of one size",
            "Build the loader with batch_size and a sampler",
        )


_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""Tensors as long as the decoder's sequences, in models that have an encoder too."""

Batch = dict[str, Tensor]


class BatchShape:
    """Rows and columns of the batches of a run, by Megatron-LM's arguments."""

    def __init__(self, args: Any) -> None:
        self.micro_batch_size: int = args.micro_batch_size
        self.rows: int = args.micro_batch_size * args.num_micro_batches
        # Stages of a pipeline, and ranks that share sequences, agree on the shape beforehand.
        shares = args.sequence_parallel or args.context_parallel_size > 1
        self.is_fixed: bool = shares or args.pipeline_model_parallel_size > 1
        # Columns by name of the tensor; others have those of "input_ids".
        encoder = getattr(args, "encoder_seq_length", None) or args.seq_length
        self.lengths: dict[str, int | None] = {"input_ids": encoder}
        if args.model_type_name == "t5":
            self.lengths.update(dict.fromkeys(_DECODER, getattr(args, "decoder_seq_length", None)))

    def fill(self, batch: Batch) -> Batch:
        """Return a batch padded to its shape, where the shape is fixed."""
        if not self.is_fixed:
            return batch
        padded: Batch = {}
        for name, tensor in batch.items():
            length = self.lengths.get(name, self.lengths["input_ids"])
            columns = _padded(name, tensor, 1, length) if tensor.ndim > 1 else tensor
            padded[name] = _padded(name, columns, 0, self.rows)
        return padded

    def cut(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of a batch; the last one may be smaller where the shape is not fixed."""
        rows = next(iter(batch.values())).shape[0]
        starts = range(0, rows, self.micro_batch_size)
        return [{k: v[start : start + self.micro_batch_size] for k, v in batch.items()} for start in starts]


def _padded(name: str, tensor: Tensor, dim: int, size: int | None) -> Tensor:
    if size is None or tensor.shape[dim] == size:
        return tensor
    if tensor.shape[dim] > size:
        what, fix = "it has more samples", "Prepare the loader that gives these batches"
        if dim:
            what, setting = "sequences are longer", "seq_length (encoder_seq_length, decoder_seq_length)"
            fix = f"Set {setting} of MegatronLMPlugin to the longest one"
        reason = f"{what} than the {size} that all ranks have agreed on"
        raise wrong_value(name, list(tensor.shape), reason, fix)
    pads = [0, 0] * (tensor.ndim - dim - 1) + [0, size - tensor.shape[dim]]
    return F.pad(tensor, pads, value=IGNORED if name == "labels" else 0)


def share_batch(batch: Batch, device: torch.device) -> Batch:
    """Return one batch on all ranks that make up a copy of the model: that of their first one. Collators that
    draw random numbers would otherwise give each of them another one, and only some read Megatron-LM's own
    data."""
    groups = library.core("parallel_state")
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    for group in (groups.get_context_parallel_group(), groups.get_model_parallel_group()):
        if torch.distributed.get_world_size(group) > 1:
            first = torch.distributed.get_process_group_ranks(group)[0]
            batch = _broadcast(batch, first, group, device)
    return batch


def _broadcast(tensors: Batch, source: int, group: Any, device: torch.device) -> Batch:
    """Return the tensors of one rank on all ranks of a group, which need not know their names and shapes."""
    specs: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    torch.distributed.broadcast_object_list(specs, source, group=group)
    shared: Batch = {}
    for name, (shape, dtype) in specs[0].items():
        is_here = torch.distributed.get_rank() == source
        shared[name] = (
            tensors[name].contiguous() if is_here else torch.empty(shape, dtype=dtype, device=device)
        )
        torch.distributed.broadcast(shared[name], source, group=group)
    return shared


# Reports

LOGITS = "logits"
_NUMBER = " (batches)"
_SUM_AND_NUMBER = 2

Report = dict[str, Tensor]


def combine_reports(reports: list[Report], groups: Any) -> dict[str, Any]:
    """Return the report of a step from those of its micro-batches; none on stages without the head.

    Pairs of sum and number become the mean over all copies of the model, single values the mean over
    micro-batches, and logits stay one after the other.
    """
    if not reports:
        return {}
    return {name: _combine_values(name, [report[name] for report in reports], groups) for name in reports[0]}


def _combine_values(name: str, values: list[Tensor], groups: Any) -> Tensor:
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
    return loss, _broadcast({} if logits is None else {LOGITS: logits}, last, group, device)[LOGITS]


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
        values: dict[str, Any] = {name: float(v) for name, v in report.items() if name != LOGITS}
        values |= {
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
        texts = [f"{name} {value:.6g} (ppl {perplexity(value):.6g})" for name, value in values.items()]
        if texts:
            logger.info(f"{when}: {', '.join(texts)}", main_process_only=False)


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
