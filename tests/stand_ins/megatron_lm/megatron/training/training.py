"""Model, optimizer, scheduler and data."""

import dataclasses
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch.utils.data import DataLoader

from .global_vars import get_args


def num_floating_point_operations(args: Any, batch_size: int) -> int:
    return int(6 * batch_size * args.num_layers * args.hidden_size**2)


def get_model(model_provider_func: Any, model_type: Any) -> list[Any]:
    args = get_args()
    stages = args.virtual_pipeline_model_parallel_size
    if stages is None:
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        parts = [model_provider_func(pre_process=first, post_process=last, config=None, pg_collection=None)]
    else:
        parts = [_virtual(model_provider_func, stage) for stage in range(stages)]
    for part in parts:
        part.model_type = model_type
        for parameter in part.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if args.bf16 or args.fp16:
        parts = [Float16Module(get_model_config(part), part) for part in parts]
    names = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    config = DistributedDataParallelConfig(**{k: v for k, v in vars(args).items() if k in names})
    return [
        DistributedDataParallel(get_model_config(part), config, part, disable_bucketing=index > 0)
        for index, part in enumerate(parts)
    ]


def _virtual(model_provider_func: Any, stage: int) -> Any:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    part = model_provider_func(pre_process=first, post_process=last, vp_stage=stage)
    part.vp_stage = stage
    return part


def get_megatron_optimizer_config(args: Any) -> tuple[OptimizerConfig, Any]:
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{k: v for k, v in vars(args).items() if k in names})
    return config, get_standard_config_overrides(config)


def get_optimizer_param_scheduler(optimizer: Any) -> OptimizerParamScheduler:
    args = get_args()
    unit = args.global_batch_size if args.train_iters else 1
    length = args.train_iters or args.train_samples
    decay = (args.lr_decay_iters if args.train_iters else args.lr_decay_samples) or length
    warmup = args.lr_warmup_iters if args.train_iters else args.lr_warmup_samples
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup * unit,
        lr_decay_steps=decay * unit,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=length * unit,
        wd_incr_style=args.weight_decay_incr_style,
    )


def setup_model_and_optimizer(model_type: Any, model_provider_func: Any = None) -> tuple[Any, Any, Any]:
    model = get_model(model_provider_func, model_type)
    config, overrides = get_megatron_optimizer_config(get_args())
    optimizer = get_megatron_optimizer(config, model, overrides, use_gloo_process_groups=True)
    return model, optimizer, get_optimizer_param_scheduler(optimizer)


def build_train_valid_test_data_iterators(provider: Any) -> list[Any]:
    args = get_args()
    assert provider.is_distributed
    samples = args.train_iters * args.global_batch_size
    datasets = provider([samples, samples, samples])
    return [_read(dataset) for dataset in datasets]


def _read(dataset: Any) -> Any:
    if dataset is None:
        return None
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    micro = get_args().micro_batch_size
    mine = [i for i in range(len(dataset)) if i // micro % size == rank]
    return iter(DataLoader(dataset, batch_size=micro, sampler=mine, drop_last=True))
