"""Input and output of the steps of Megatron-LM.

The strategy prepares the loaders. The engine pads batches, broadcasts them to the ranks of a model replica,
splits them into micro-batches, and combines and logs the losses that the micro-batches report.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import torch.distributed as dist

logger = get_logger(__name__)

_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


class MegatronLMDummyDataLoader:
    """Placeholder in `prepare` for a loader of the datasets of Megatron-LM.

    Pass three of them to `prepare`, for training, validation and test.

    Args:
        **dataset_kwargs: Arguments of Megatron-LM for its data: `data_path`, `splits_string`, `seq_length`,
            `micro_batch_size`, and others.

    Attributes:
        dataset_args: These arguments.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dict(dataset_kwargs)

    def set_megatron_data_args(self) -> None:
        """Sets the arguments on the plugin of the run."""
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
        """Returns the function that builds the three datasets."""
        plugin = accelerator.state.megatron_lm_plugin
        provider: Any = plugin.custom_megatron_datasets_provider_function or build_datasets
        provider.is_distributed = True  # Megatron-LM checks it
        return provider  # type: ignore[no-any-return]

    def build_train_valid_test_data_iterators(self, accelerator: object) -> tuple[Any, Any, Any]:
        """Returns the iterators for training, validation and test, or None on ranks that read no data."""
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        args = library.get_args()
        consumed = getattr(args, "consumed_samples", None) or [0, 0]
        for index, name in enumerate(("consumed_train_samples", "consumed_valid_samples")):
            setattr(args, name, getattr(args, name, 0) or consumed[index])
        train, valid, test = library.training("training").build_train_valid_test_data_iterators(provider)
        return train, valid, test


class MegatronBatches:
    """Iterator over batches of a dataset of Megatron-LM, each with all micro-batches of a step.

    The batches are empty on ranks that read no data, to which the engine broadcasts them.
    """

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
    """Shape and coordinate of this rank in the process groups of Megatron-LM.

    It has the methods of `torch.distributed.DeviceMesh` that loaders use to shard batches. A `DeviceMesh`
    would create the same groups a second time.
    """

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


def prepare_data_loader(accelerator: Any, dataloader: object) -> Any:
    """Returns a loader whose batches have all micro-batches of a step, sharded over data-parallel ranks.

    Args:
        accelerator: Has `state.megatron_lm_plugin`.
        dataloader: A loader of torch, or a placeholder for a loader of Megatron-LM.

    Returns:
        A prepared loader. For a placeholder a tuple of three, for training, validation and test.
    """
    if not isinstance(dataloader, MegatronLMDummyDataLoader):
        return accelerator.prepare_data_loader(dataloader)
    number = int(accelerator.state.megatron_lm_plugin.num_micro_batches)
    sources = dataloader.build_train_valid_test_data_iterators(accelerator)
    return tuple(MegatronBatches(source, number) for source in sources)


def with_batch_size(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Returns a loader of the same samples with another batch size."""
    if loader.batch_size == size:
        return loader
    refuse_batch_sampler(loader)
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    kept = {"sampler": sampler, "drop_last": loader.drop_last, **kept_settings(loader)}
    return DataLoader(loader.dataset, batch_size=size, **kept)


def refuse_batch_sampler(loader: DataLoader[Any]) -> None:
    """Raises a `ConfigurationError` for a loader with a custom batch sampler."""
    if loader.batch_size is None:
        raise wrong_value(
            "batch_size",
            None,
            "the loader does not define how many samples its batches have, and a step runs "
            "num_micro_batches micro-batches of one size",
            "Build the loader with batch_size and a sampler",
        )


_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""Tensors with the sequence length of the decoder, in models with an encoder."""

Batch = dict[str, Tensor]


class BatchShape:
    """Shape of the batches of a run, computed from the arguments of Megatron-LM."""

    def __init__(self, args: Namespace) -> None:
        self.micro_batch_size: int = args.micro_batch_size
        self.rows: int = args.micro_batch_size * args.num_micro_batches
        # Pipeline stages, and ranks that shard sequences, need to know the shape in advance.
        shards_sequences = args.sequence_parallel or args.context_parallel_size > 1
        self.is_fixed: bool = shards_sequences or args.pipeline_model_parallel_size > 1
        # Sequence length by name of the tensor; other tensors have that of "input_ids".
        encoder = getattr(args, "encoder_seq_length", None) or args.seq_length
        self.lengths: dict[str, int | None] = {"input_ids": encoder}
        if args.model_type_name == "t5":
            self.lengths.update(dict.fromkeys(_DECODER, getattr(args, "decoder_seq_length", None)))

    def pad(self, batch: Batch) -> Batch:
        """Returns a batch padded to the shape, if the shape is fixed."""
        if not self.is_fixed:
            return batch
        padded: Batch = {}
        for name, tensor in batch.items():
            length = self.lengths.get(name, self.lengths["input_ids"])
            columns = _pad_dim(name, tensor, 1, length) if tensor.ndim > 1 else tensor
            padded[name] = _pad_dim(name, columns, 0, self.rows)
        return padded

    def split(self, batch: Batch) -> list[Batch]:
        """Returns the micro-batches of a batch, the last of which may be smaller."""
        rows = next(iter(batch.values())).shape[0]
        starts = range(0, rows, self.micro_batch_size)
        return [{k: v[start : start + self.micro_batch_size] for k, v in batch.items()} for start in starts]


def _pad_dim(name: str, tensor: Tensor, dim: int, size: int | None) -> Tensor:
    if size is None or tensor.shape[dim] == size:
        return tensor
    if tensor.shape[dim] > size:
        what, fix = "it has more samples", "Prepare the loader of these batches"
        if dim:
            what, setting = "sequences are longer", "seq_length (encoder_seq_length, decoder_seq_length)"
            fix = f"Set {setting} of MegatronLMPlugin to the longest one"
        reason = f"{what} than the {size} of the fixed batch shape"
        raise wrong_value(name, list(tensor.shape), reason, fix)
    pads = [0, 0] * (tensor.ndim - dim - 1) + [0, size - tensor.shape[dim]]
    return F.pad(tensor, pads, value=IGNORED if name == "labels" else 0)


def broadcast_batch(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch of the first rank of a model replica on all ranks of the replica.

    Collate functions may use random numbers, and only some ranks read the data of Megatron-LM.
    """
    groups = library.core("parallel_state")
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    for group in (groups.get_context_parallel_group(), groups.get_model_parallel_group()):
        if torch.distributed.get_world_size(group) > 1:
            first = torch.distributed.get_process_group_ranks(group)[0]
            batch = _broadcast(batch, first, group, device)
    return batch


def _broadcast(tensors: Batch, source: int, group: dist.ProcessGroup, device: torch.device) -> Batch:
    """Returns the tensors of one rank on all ranks of a group, without known shapes."""
    specs: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    torch.distributed.broadcast_object_list(specs, source, group=group)
    is_source = torch.distributed.get_rank() == source
    received: Batch = {}
    for name, (shape, dtype) in specs[0].items():
        received[name] = (
            tensors[name].contiguous() if is_source else torch.empty(shape, dtype=dtype, device=device)
        )
        torch.distributed.broadcast(received[name], source, group=group)
    return received


# Reports

LOGITS = "logits"
_SUM_AND_COUNT = 2
"""Number of elements of a value that is the pair of a sum and a count."""

Report = dict[str, Tensor]
Totals = dict[str, tuple[Any, int]]
"""Sum and number of the values of each loss."""


def combine_reports(reports: list[Report], groups: object) -> dict[str, Any]:
    """Returns the report of a step from those of its micro-batches.

    It is empty on pipeline stages without the head. Pairs of a sum and a count are reduced to the mean over
    all data-parallel ranks, single values to the mean over the micro-batches, and logits are concatenated.
    """
    if not reports:
        return {}
    return {name: _combine_values(name, [report[name] for report in reports], groups) for name in reports[0]}


def _combine_values(name: str, values: list[Tensor], groups: Any) -> Tensor:
    if name == LOGITS:
        return torch.cat(values)
    stacked = torch.stack([value.reshape(-1).float() for value in values])
    if stacked.shape[1] != _SUM_AND_COUNT:
        return stacked.mean()
    pair = stacked.sum(0)
    torch.distributed.all_reduce(pair, group=groups.get_data_parallel_group(with_context_parallel=True))
    return pair[0] / pair[1].clamp(min=1)


def broadcast_outputs(
    report: dict[str, Any], groups: Any, device: torch.device, with_logits: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the loss and logits of the last pipeline stage on all stages."""
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


class LossLog:
    """Sums the reports of steps and logs their means, on the ranks of the last pipeline stage."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.writer = library.training("global_vars").get_tensorboard_writer()
        self.totals: Totals = {}

    def add(self, totals: Totals, report: dict[str, Any]) -> None:
        """Adds a report to the sums in `totals`."""
        for name, value in report.items():
            if name != LOGITS:
                total, count = totals.get(name, (0.0, 0))
                totals[name] = (total + value.detach(), count + 1)

    def log_step(self, engine: Any, report: dict[str, Any], zeros: torch.Tensor) -> Totals:
        """Logs a training step at the interval of the run, and returns the sums since the last log."""
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

    def _write_step(self, engine: Any, report: dict[str, Any], zeros: torch.Tensor) -> None:
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

    def log_evaluation(self, iteration: int, totals: Totals) -> None:
        """Logs the means of an evaluation and their perplexity."""
        values = means(totals)
        self._log(f"evaluation after iteration {iteration}", values)
        if self.writer is None:
            return
        for name, value in values.items():
            self.writer.add_scalar(f"{name} validation", value, iteration)
            if getattr(self.args, "log_validation_ppl_to_tensorboard", False):
                self.writer.add_scalar(f"{name} validation ppl", perplexity(value), iteration)

    def _log(self, title: str, values: dict[str, float]) -> None:
        texts = [f"{name} {value:.6g} (ppl {perplexity(value):.6g})" for name, value in values.items()]
        if texts:
            logger.info(f"{title}: {', '.join(texts)}", main_process_only=False)


def means(totals: Totals) -> dict[str, float]:
    """Returns the mean of each sum in `totals`."""
    return {name: float(total) / count for name, (total, count) in totals.items()}


def perplexity(loss: float) -> float:
    """Returns the exponential of a loss, at most e^20, so that it can be plotted."""
    return math.exp(min(20.0, loss))


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Returns the means of losses over all data-parallel ranks.

    Called on all ranks of a pipeline stage.

    Args:
        losses: 0-d tensors.

    Returns:
        A 1-d tensor with one mean per loss, without gradients.
    """
    group = library.core("parallel_state").get_data_parallel_group(with_context_parallel=True)
    averaged = torch.stack([loss.detach().reshape(()).float() for loss in losses])
    torch.distributed.all_reduce(averaged, group=group)
    return averaged / torch.distributed.get_world_size(group)


def gather_across_data_parallel_groups(tensor: torch.Tensor) -> Any:
    """Returns the values of all data-parallel ranks, concatenated along the first dimension.

    The ranks of one model replica have the same values, and all of them receive the result.

    Args:
        tensor: Nested tensors. A 0-d tensor is one row.
    """
    group = library.core("parallel_state").get_data_parallel_group()

    def gather(leaf: Tensor) -> Tensor:
        rows = leaf.detach().reshape(1) if leaf.ndim == 0 else leaf.detach().contiguous()
        gathered = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(gathered, rows, group=group)
        return torch.cat(gathered)

    return recursively_apply(gather, tensor, error_on_other_type=True)
