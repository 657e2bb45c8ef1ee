"""Whether a run fits Megatron-LM: all of its problems, found before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.base import ConfigurationError, environ
from accelerate.plugins import (
    MegatronLMPlugin,
    find_wrong_network,
    find_wrong_sizes,
    find_wrong_values,
    optimizer_kind,
)
from accelerate.strategies.bundle import Bundle, Kind
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.data import MegatronLMDummyDataLoader, refuse_batch_sampler
from accelerate.strategies.megatron.engine import MegatronLMDummyScheduler

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""The first of NVIDIA's GPUs, by compute capability, that keeps the order of kernels in several queues."""


def plan(
    plugin: MegatronLMPlugin, bundle: Bundle, processes: int, mixed_precision: str, steps: int
) -> list[str]:
    """Write what the objects of a run say to the plugin, and return what is wrong with it, one line each.

    Args:
        steps: backward passes for each step of the optimizer.
    """
    problems = [*find_missing(plugin), *find_wrong_values(plugin), *find_wrong_sizes(plugin, processes)]
    if steps > 1:
        problems.append(
            f"gradient_accumulation_steps={steps}: Megatron-LM accumulates by itself. Set num_micro_batches "
            "of MegatronLMPlugin instead"
        )
    plugin.set_mixed_precision(mixed_precision)
    problems += _plan_data(plugin, bundle, processes)
    problems += _plan_model(plugin, bundle)
    problems += _plan_optimizer(plugin, bundle)
    return problems


def find_missing(plugin: MegatronLMPlugin) -> list[str]:
    """Return what this machine lacks for Megatron-LM, one line each."""
    engine, apex = library.exists("transformer_engine"), library.exists("apex")
    shares = (plugin.context_parallel_size or 1) > 1
    problems = library.find_missing()
    if plugin.sequence_parallelism and not (engine or apex):
        problems.append(
            "sequence_parallelism=True: the layers for it are in Transformer Engine and in Apex, and neither "
            "can be imported. Install Transformer Engine"
        )
    if shares and not engine:
        problems.append(
            f"context_parallel_size={plugin.context_parallel_size}: the layers for it are in Transformer "
            "Engine, which cannot be imported. Install it"
        )
    if plugin.use_precision_aware_optimizer and not engine:
        problems.append(
            "use_precision_aware_optimizer=True: its Adam is that of Transformer Engine, which cannot be "
            "imported. Install it"
        )
    if plugin.use_custom_fsdp and not library.exists("einops"):
        problems.append("use_custom_fsdp=True: Megatron's own FSDP needs einops. Run `pip install einops`")
    if not problems:
        problems += _wrong_queues(bool(plugin.use_custom_fsdp), shares or (plugin.tp_degree or 1) > 1)
    return problems


def _wrong_queues(own_fsdp: bool, shares: bool) -> list[str]:
    """Return what is wrong with the number of queues by which kernels come to a GPU."""
    number = environ.current().get(QUEUES)
    if own_fsdp and number == "1":
        return [f"{QUEUES}=1: use_custom_fsdp wants kernels to come in several queues. Unset it"]
    if own_fsdp or not shares or number == "1" or torch.cuda.get_device_capability()[0] >= BLACKWELL:
        return []
    return [
        f"{QUEUES}={number}: Megatron-LM shares layers and sequences on this GPU only where kernels come in "
        "one queue. Set it to 1 before the program starts; `accelerate launch --use_megatron_lm` does"
    ]


def dummies(bundle: Bundle, kind: type) -> list[Any]:
    """Return those objects that stand for one of Megatron-LM's."""
    return [obj for obj in bundle.objects if isinstance(obj, kind)]


def _plan_data(plugin: MegatronLMPlugin, bundle: Bundle, processes: int) -> list[str]:
    stand_ins, problems = dummies(bundle, MegatronLMDummyDataLoader), []
    for stand_in in stand_ins:
        stand_in.set_megatron_data_args()
        plugin.megatron_dataset_flag = True
    sizes = [loader.batch_size for loader in bundle.of(Kind.LOADER) if loader.batch_size is not None]
    for loader in bundle.of(Kind.LOADER):
        problems += _message_of(partial(refuse_batch_sampler, loader))
    micro_batch_size = plugin.dataset_args.get("micro_batch_size") if stand_ins else None
    if micro_batch_size is None and not sizes and not problems:
        problems.append(
            "micro_batch_size: nothing says how many samples a micro-batch has. Prepare the loaders together "
            "with the model, or pass micro_batch_size to MegatronLMDummyDataLoader"
        )
    if micro_batch_size is not None or sizes:
        copy = (plugin.tp_degree or 1) * (plugin.pp_degree or 1) * (plugin.context_parallel_size or 1)
        size = micro_batch_size
        if size is None:
            size = (min if plugin.is_train_batch_min else max)(sizes)
        plugin.set_training_args(int(size), max(1, processes // copy))
    return problems


def _plan_model(plugin: MegatronLMPlugin, bundle: Bundle) -> list[str]:
    if len(bundle.models) != 1:
        return [
            f"{len(bundle.models)} models: Megatron-LM trains one in a process, together with its optimizer. "
            "Pass one model to `prepare`"
        ]
    model = bundle.models[0]
    needs_batch = not (plugin.seq_length or plugin.encoder_seq_length or plugin.decoder_seq_length)
    batch = _sample(bundle.of(Kind.LOADER)) if needs_batch else None
    problems = _message_of(lambda: plugin.set_network_size_args(model, batch))
    if problems:
        return problems
    network = plugin.megatron_lm_default_args
    if not network.get("pretraining_flag", True) and plugin.custom_model_provider_function is None:
        problems.append(
            f"{type(model).__name__}: Megatron-LM has models for pretraining only. Pass "
            "custom_model_provider_function to MegatronLMPlugin, or another model"
        )
    return [*problems, *find_wrong_network(plugin, network)]


def _plan_optimizer(plugin: MegatronLMPlugin, bundle: Bundle) -> list[str]:
    problems: list[str] = []
    if len(bundle.optimizers) != 1:
        problems.append(
            f"{len(bundle.optimizers)} optimizers: Megatron-LM builds one, like the one that is given. Pass "
            "one to `prepare`, together with the model"
        )
    else:
        optimizer = bundle.optimizers[0]
        problems += _message_of(lambda: optimizer_kind(optimizer))
        if not problems:
            plugin.set_optimizer_type(optimizer)
            problems += _wrong_rates(plugin)
    return [*problems, *_plan_schedule(plugin, bundle)]


def _wrong_rates(plugin: MegatronLMPlugin) -> list[str]:
    highest = plugin.megatron_lm_default_args["lr"]
    if plugin.min_lr <= highest:
        return []
    return [f"min_lr={plugin.min_lr}: the optimizer's learning rate is lower, {highest}. Make it smaller"]


def _plan_schedule(plugin: MegatronLMPlugin, bundle: Bundle) -> list[str]:
    schedulers = bundle.of(Kind.SCHEDULER)
    stand_ins = dummies(bundle, MegatronLMDummyScheduler)
    problems = [
        f"{type(scheduler).__name__}: Megatron-LM steps schedulers of its own only. Pass "
        "MegatronLMDummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...), and lr_decay_style "
        "to MegatronLMPlugin"
        for scheduler in schedulers
        if scheduler not in stand_ins
    ]
    if stand_ins:
        plugin.set_scheduler_args(stand_ins[0])
        problems += [line for line in find_wrong_values(plugin) if "different units" in line]
    else:
        plugin.set_schedule_args()
    if not problems and not plugin.train_iters and not plugin.train_samples:
        problems.append(
            "train_iters: nothing says how long training is. Prepare MegatronLMDummyScheduler(optimizer, "
            "total_num_steps=...), or set train_iters or train_samples of MegatronLMPlugin"
        )
    return problems


def _message_of(ask: Callable[[], Any]) -> list[str]:
    """Return what an error says, instead of raising it."""
    try:
        ask()
    except ConfigurationError as error:
        return [str(error).rstrip(".")]
    return []


def _sample(loaders: Iterable[Any]) -> Any:
    """Return the first samples of a dataset as a batch, without a draw from any generator; None of one that
    can only be read from its beginning."""
    for loader in loaders:
        if isinstance(loader.dataset, IterableDataset) or loader.collate_fn is None or not loader.batch_size:
            continue
        number = min(loader.batch_size, len(loader.dataset))
        return loader.collate_fn([loader.dataset[index] for index in range(number)])
    return None
