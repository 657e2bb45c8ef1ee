"""Megatron-LM is started from the plugin, and from nothing else."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest
import torch

from accelerate.base import StateError
from accelerate.strategies.megatron import library, prepare_model_optimizer_scheduler, prepare_scheduler
from accelerate.utils import MegatronLMPlugin
from accelerate.utils.megatron_lm import initialize

from .conftest import AttnBackend, Fake, Start


def test_arguments_follow_from_the_plugin_and_the_process(
    start: Start, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "of the script"])
    monkeypatch.setattr(library, "exists", lambda name: name == "einops" or name.startswith("megatron"))
    start(
        num_micro_batches=2, attention_backend="flash", use_custom_fsdp=True, other_megatron_args={"seed": 11}
    )
    assert fake.argv == ["train.py"]
    assert sys.argv == ["train.py", "--seed", "of the script"]
    args = fake.get_args()
    assert (args.rank, args.world_size, args.local_rank) == (0, 1, 0)
    assert (args.micro_batch_size, args.global_batch_size, args.seq_length) == (2, 4, 6)
    assert (args.seed, args.attention_backend) == (11, AttnBackend.flash)
    assert args.use_megatron_fsdp is True
    assert args.transformer_impl == "local"  # there is no Transformer Engine here
    assert args.padded_vocab_size == 16


def test_order_of_the_start(start: Start, fake: Fake) -> None:
    start(other_megatron_args={"seed": 11})
    names = [call[0] for call in fake.calls]
    assert names == [
        "validate_args",
        "set_global_variables",
        "initialize_model_parallel",
        "seed",
        "setup_model_and_optimizer",
    ]
    assert fake.called("initialize_model_parallel") == [("initialize_model_parallel", 1, 1, 1, "")]
    assert fake.called("seed") == [("seed", 11)]
    assert fake.called("set_global_variables") == [("set_global_variables", False)]
    ((_, provider, kind),) = fake.called("setup_model_and_optimizer")
    assert (provider, kind) == (library.model_provider_func, "decoder")


def test_other_order_of_groups(fake: Fake) -> None:
    fake.args = Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        use_tp_pp_dp_mapping=True,
        seed=3,
        data_parallel_random_init=True,
    )
    library.finish_mpu_init()
    assert fake.called("initialize_model_parallel")[0][-1] == "tp-cp-ep-pp-dp"
    assert torch.distributed.get_world_size() == 1


def test_seeds_differ_between_stages_and_copies(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.args = Namespace(seed=3, data_parallel_random_init=True)
    groups: Any = sys.modules["megatron.core.parallel_state"]
    monkeypatch.setattr(groups, "get_pipeline_model_parallel_rank", lambda: 2)
    monkeypatch.setattr(groups, "get_data_parallel_rank", lambda: 1)
    library.finish_mpu_init()
    assert fake.called("seed") == [("seed", 213)]


def test_once_in_a_process(start: Start, fake: Fake) -> None:
    accelerator, *_ = start()
    with pytest.raises(StateError, match="runs in this process already"):
        initialize(accelerator)


def test_unknown_arguments_give_a_warning(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start(other_megatron_args={"spelled_wrong": 1})
    assert "no arguments spelled_wrong" in caplog.text


def test_further_arguments_and_defaults(fake: Fake) -> None:
    accelerator = Namespace(
        state=Namespace(
            megatron_lm_plugin=Namespace(
                megatron_lm_default_args={"orig_vocab_size": 9, "seed": 2}, megatron_dataset_flag=True
            )
        ),
        process_index=0,
        num_processes=1,
        local_process_index=0,
    )
    accelerator.state.megatron_lm_plugin.megatron_lm_default_args["tensor_model_parallel_size"] = 1
    initialize(accelerator, args_defaults={"seed": 1, "split": "1,1,1"})
    args = fake.get_args()
    assert (args.seed, args.split, args.padded_vocab_size) == (2, "1,1,1", 16)
    assert fake.called("set_global_variables") == [("set_global_variables", True)]


def test_a_custom_model_is_used(fake: Fake) -> None:
    fake.args = Namespace()
    plugin = MegatronLMPlugin(custom_prepare_model_function=lambda: "part")
    accelerator = Namespace(state=Namespace(megatron_lm_plugin=plugin))
    model, optimizer, scheduler = prepare_model_optimizer_scheduler(accelerator)
    assert model == ["part"]
    own = {"biases": {"wd_mult": 0.0}, "rates": {"max_lr": 1.0}}
    assert optimizer == ("config", ["part"], {"config_overrides": own})
    assert scheduler == ("scheduler of", optimizer)
    assert prepare_scheduler(accelerator, optimizer, None) == scheduler


def test_a_custom_model_provider_is_used(start: Start, fake: Fake) -> None:
    def provider(**options: Any) -> None: ...

    start(custom_model_provider_function=provider)
    assert fake.called("setup_model_and_optimizer")[0][1] is provider


def test_missing_kernels_are_not_requested(start: Start, fake: Fake) -> None:
    start(other_megatron_args={"masked_softmax_fusion": True})
    args = fake.get_args()
    assert args.gradient_accumulation_fusion is False
    assert args.no_persist_layer_norm is True
    assert args.masked_softmax_fusion is True  # the user knows better


def test_dependent_arguments_of_megatron_are_set(
    start: Start, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "exists", lambda name: name == "einops" or name.startswith("megatron"))
    start(attention_backend="local", use_custom_fsdp=True)
    args = fake.get_args()
    assert (args.spec, args.transformer_impl, args.ckpt_format) == (["local"], "local", "fsdp_dtensor")


def test_conditions_of_the_user(fake: Fake) -> None:
    fake.args = Namespace(lr=0.5, min_lr=0.1)
    plugin = MegatronLMPlugin(
        no_wd_decay_cond=lambda name, parameter: name.endswith("bias"),
        scale_lr_cond=lambda name, parameter: parameter.ndim == 1,
        lr_mult=2.0,
    )
    accelerator = Namespace(state=Namespace(megatron_lm_plugin=plugin))
    model, (config, parts, further), scheduler = prepare_model_optimizer_scheduler(accelerator)
    assert fake.called("get_model") == [("get_model", library.model_provider_func, "decoder")]
    assert (model, parts, config) == (fake.parts, fake.parts, "config")
    assert scheduler[0] == "scheduler of"
    kept, decay, rate = further["config_overrides"]
    assert kept == "rates"  # Megatron-LM's own choice of what decays is gone
    assert further["config_overrides"][decay] == {"wd_mult": 0.0}
    assert further["config_overrides"][rate] == {"max_lr": 1.0, "min_lr": 0.2}
    matrix, vector = torch.zeros(1, 1), torch.zeros(1)
    assert [decay.matches(matrix, name) for name in ("a.bias", "a.weight")] == [True, False]
    assert [rate.matches(found, "a") for found in (matrix, vector)] == [False, True]
