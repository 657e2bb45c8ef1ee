"""Marks, base classes and commands for tests."""

from accelerate.base.environ import parse_flag_from_env as parse_flag_from_env
from accelerate.commands.running import SubprocessCallException as SubprocessCallException
from accelerate.commands.running import execute_subprocess_async as execute_subprocess_async
from accelerate.commands.running import path_in_accelerate_package as path_in_accelerate_package
from accelerate.commands.running import run_command as run_command
from accelerate.test_utils.testing.cases import AccelerateTestCase as AccelerateTestCase
from accelerate.test_utils.testing.cases import MockingTestCase as MockingTestCase
from accelerate.test_utils.testing.cases import TempDirTestCase as TempDirTestCase
from accelerate.test_utils.testing.cases import are_the_same_tensors as are_the_same_tensors
from accelerate.test_utils.testing.cases import assert_exception as assert_exception
from accelerate.test_utils.testing.cases import capture_call_output as capture_call_output
from accelerate.test_utils.testing.processes import DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND
from accelerate.test_utils.testing.processes import device_count as device_count
from accelerate.test_utils.testing.processes import get_launch_command as get_launch_command
from accelerate.test_utils.testing.processes import get_torch_dist_unique_port as get_torch_dist_unique_port
from accelerate.test_utils.testing.processes import memory_allocated_func as memory_allocated_func
from accelerate.test_utils.testing.processes import pytest_xdist_worker_id as pytest_xdist_worker_id
from accelerate.test_utils.testing.processes import torch_device as torch_device
from accelerate.test_utils.testing.requirements import get_backend as get_backend
from accelerate.test_utils.testing.requirements import require_aim as require_aim
from accelerate.test_utils.testing.requirements import require_bnb as require_bnb
from accelerate.test_utils.testing.requirements import require_clearml as require_clearml
from accelerate.test_utils.testing.requirements import require_comet_ml as require_comet_ml
from accelerate.test_utils.testing.requirements import require_cpu as require_cpu
from accelerate.test_utils.testing.requirements import require_cuda as require_cuda
from accelerate.test_utils.testing.requirements import require_cuda_or_hpu as require_cuda_or_hpu
from accelerate.test_utils.testing.requirements import require_cuda_or_xpu as require_cuda_or_xpu
from accelerate.test_utils.testing.requirements import require_datasets as require_datasets
from accelerate.test_utils.testing.requirements import require_deepspeed as require_deepspeed
from accelerate.test_utils.testing.requirements import require_dvclive as require_dvclive
from accelerate.test_utils.testing.requirements import require_fp8 as require_fp8
from accelerate.test_utils.testing.requirements import require_fp16 as require_fp16
from accelerate.test_utils.testing.requirements import require_fsdp2 as require_fsdp2
from accelerate.test_utils.testing.requirements import require_hpu as require_hpu
from accelerate.test_utils.testing.requirements import require_huggingface_suite as require_huggingface_suite
from accelerate.test_utils.testing.requirements import require_import_timer as require_import_timer
from accelerate.test_utils.testing.requirements import require_matplotlib as require_matplotlib
from accelerate.test_utils.testing.requirements import require_mlflow as require_mlflow
from accelerate.test_utils.testing.requirements import require_mlu as require_mlu
from accelerate.test_utils.testing.requirements import require_mps as require_mps
from accelerate.test_utils.testing.requirements import require_multi_device as require_multi_device
from accelerate.test_utils.testing.requirements import require_multi_gpu as require_multi_gpu
from accelerate.test_utils.testing.requirements import require_multi_gpu_or_xpu as require_multi_gpu_or_xpu
from accelerate.test_utils.testing.requirements import require_multi_xpu as require_multi_xpu
from accelerate.test_utils.testing.requirements import require_musa as require_musa
from accelerate.test_utils.testing.requirements import require_neuron as require_neuron
from accelerate.test_utils.testing.requirements import require_non_cpu as require_non_cpu
from accelerate.test_utils.testing.requirements import require_non_hpu as require_non_hpu
from accelerate.test_utils.testing.requirements import require_non_torch_xla as require_non_torch_xla
from accelerate.test_utils.testing.requirements import require_non_xpu as require_non_xpu
from accelerate.test_utils.testing.requirements import require_npu as require_npu
from accelerate.test_utils.testing.requirements import require_pandas as require_pandas
from accelerate.test_utils.testing.requirements import require_peft as require_peft
from accelerate.test_utils.testing.requirements import require_pippy as require_pippy
from accelerate.test_utils.testing.requirements import require_schedulefree as require_schedulefree
from accelerate.test_utils.testing.requirements import require_sdaa as require_sdaa
from accelerate.test_utils.testing.requirements import require_single_device as require_single_device
from accelerate.test_utils.testing.requirements import require_single_gpu as require_single_gpu
from accelerate.test_utils.testing.requirements import require_single_xpu as require_single_xpu
from accelerate.test_utils.testing.requirements import require_swanlab as require_swanlab
from accelerate.test_utils.testing.requirements import require_tensorboard as require_tensorboard
from accelerate.test_utils.testing.requirements import require_timm as require_timm
from accelerate.test_utils.testing.requirements import require_torch_min_version as require_torch_min_version
from accelerate.test_utils.testing.requirements import require_torchao as require_torchao
from accelerate.test_utils.testing.requirements import (
    require_torchdata_stateful_dataloader as require_torchdata_stateful_dataloader,
)
from accelerate.test_utils.testing.requirements import require_torchvision as require_torchvision
from accelerate.test_utils.testing.requirements import require_tp as require_tp
from accelerate.test_utils.testing.requirements import require_tpu as require_tpu
from accelerate.test_utils.testing.requirements import require_trackers as require_trackers
from accelerate.test_utils.testing.requirements import require_trackio as require_trackio
from accelerate.test_utils.testing.requirements import (
    require_transformer_engine as require_transformer_engine,
)
from accelerate.test_utils.testing.requirements import (
    require_transformer_engine_mxfp8 as require_transformer_engine_mxfp8,
)
from accelerate.test_utils.testing.requirements import require_transformers as require_transformers
from accelerate.test_utils.testing.requirements import require_triton as require_triton
from accelerate.test_utils.testing.requirements import require_wandb as require_wandb
from accelerate.test_utils.testing.requirements import require_xpu as require_xpu
from accelerate.test_utils.testing.requirements import run_first as run_first
from accelerate.test_utils.testing.requirements import skip as skip
from accelerate.test_utils.testing.requirements import slow as slow
