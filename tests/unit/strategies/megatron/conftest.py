"""A recording fake of Megatron-LM: its public entry points, in one process, without its kernels."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin

VOCABULARY, LENGTH = 16, 6


KNOWN_ARGUMENTS = [
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "attention_backend",
    "data_path",
    "decoder_seq_length",
    "end_weight_decay",
    "ffn_hidden_size",
    "global_batch_size",
    "hidden_size",
    "load",
    "lr",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_style",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "max_position_embeddings",
    "micro_batch_size",
    "min_lr",
    "norm_epsilon",
    "num_attention_heads",
    "num_layers",
    "optimizer",
    "position_embedding_type",
    "save",
    "seq_length",
    "split",
    "start_weight_decay",
    "tensorboard_dir",
    "tokenizer_type",
    "train_iters",
    "train_samples",
    "untie_embeddings_and_output_weights",
    "use_megatron_fsdp",
    "weight_decay",
    "weight_decay_incr_style",
]
"""Arguments that Megatron-LM's parser knows, besides those of a plugin with default values."""


class Part(nn.Module):
    """A part of a model as Megatron-LM wraps it: per-token losses for labels, logits without."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.calls: list[dict[str, Any]] = []
        self.config = SimpleNamespace()
        self.cleared = 0

    def zero_grad_buffer(self) -> None:
        self.cleared += 1

    def forward(
        self, tokens: torch.Tensor, positions: Any, mask: Any, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.calls.append({"tokens": tokens, "positions": positions, "mask": mask, "labels": labels})
        logits = self.table(tokens)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class Optimizer(torch.optim.SGD):
    """Megatron-LM's: `step` tells whether it stepped, the norm, and how many gradients were zero."""

    finite = True
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.finite:
            super().step()
        return self.finite, 0.5, None

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor(2.0)

    def reload_model_params(self) -> None:
        self.reloaded = True


class Scheduler:
    """Megatron-LM's."""

    def __init__(self) -> None:
        self.increments: list[int] = []

    def step(self, increment: int) -> None:
        self.increments.append(increment)

    def state_dict(self) -> dict[str, Any]:
        return {"increments": self.increments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.increments = list(state["increments"])


class Fake:
    """The recorded calls of Megatron-LM, in `calls`, and their results."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.args: Namespace | None = None
        self.writer: Any = None
        self.running = False
        self.sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1}
        self.parts = [Part()]
        self.optimizer = Optimizer(self.parts[0].parameters(), lr=0.1)
        self.scheduler = Scheduler()
        self.checkpoints: dict[str, int] = {}
        self.argv: list[str] = []

    # megatron.training

    def parse_args(self, extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
        assert ignore_unknown_args
        self.argv = list(sys.argv)
        known = dict.fromkeys(
            set(KNOWN_ARGUMENTS) | set(MegatronLMPlugin().megatron_lm_default_args) - {"use_custom_fsdp"}
        )
        numbers = {
            "seed": 7,
            "make_vocab_size_divisible_by": 8,
            "log_interval": 2,
            "tensorboard_log_interval": 1,
        }
        flags = dict.fromkeys(
            ("data_parallel_random_init", "reset_position_ids", "reset_attention_mask"), False
        )
        values = {
            "transformer_impl": "transformer_engine",
            "consumed_train_samples": 0,
            "encoder_seq_length": None,
            "distributed_timeout_minutes": 10,
            "bert_binary_head": False,
            "fp16": False,
        }
        return Namespace(**{**known, **numbers, **flags, **values})

    def validate_args(self, args: Namespace) -> None:
        self.calls.append(("validate_args", vars(args).copy()))

    def set_global_variables(self, args: Namespace, build_tokenizer: bool) -> None:
        self.args = args
        self.calls.append(("set_global_variables", build_tokenizer))

    def get_args(self) -> Namespace:
        assert self.args is not None
        return self.args

    def setup_model_and_optimizer(
        self, model_type: Any, model_provider_func: Any = None
    ) -> tuple[Any, Any, Any]:
        self.calls.append(("setup_model_and_optimizer", model_provider_func, model_type))
        return self.parts, self.optimizer, self.scheduler

    def get_model(self, model_type: Any, model_provider_func: Any) -> Any:
        self.calls.append(("get_model", model_provider_func, model_type))
        return self.parts

    def save_checkpoint(
        self, iteration: int, model: Any, optimizer: Any, scheduler: Any, **further: Any
    ) -> None:
        self.checkpoints[self.get_args().save] = iteration
        self.calls.append(("save_checkpoint", iteration, model, optimizer, scheduler, further))

    def load_checkpoint(self, model: Any, optimizer: Any, scheduler: Any) -> tuple[int, int]:
        self.calls.append(("load_checkpoint", self.get_args().load))
        assert self.get_args().consumed_train_samples == 0
        assert scheduler.num_steps == 0
        return self.checkpoints[self.get_args().load], 99

    # megatron.core

    def initialize_model_parallel(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        order: str = "",
    ) -> None:
        self.running = True
        given = (tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, order)
        self.calls.append(("initialize_model_parallel", *given))

    def run(self, **given: Any) -> list[Any]:
        """The schedule without a pipeline."""
        self.calls.append(("run", {name: given[name] for name in ("num_microbatches", "forward_only")}))
        reports = []
        for _ in range(given["num_microbatches"]):
            output, loss_func = given["forward_step_func"](given["data_iterator"], given["model"])
            loss, number, report = loss_func(output)
            if not given["forward_only"]:
                (loss / number / given["num_microbatches"]).backward()
            reports.append(report)
        return reports

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class AttnBackend(Enum):
    auto = 1
    flash = 2
    local = 4


class Predicate:
    """Megatron-LM's: a name, and a function of a parameter and its path."""

    def __init__(self, name: str, fn: Any) -> None:
        self.name = name
        self.fn = fn


class Key:
    """Megatron-LM's: which parameters differ."""

    def __init__(self, with_name_predicate: Predicate) -> None:
        self.predicate = with_name_predicate

    def matches(self, parameter: torch.Tensor, path: str) -> bool:
        return bool(self.predicate.fn(parameter, path))


def modules(fake: Fake) -> dict[str, dict[str, Any]]:
    """Module -> what it holds."""

    def entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

    groups: dict[str, Any] = {
        "model_parallel_is_initialized": lambda: fake.running,
        "initialize_model_parallel": fake.initialize_model_parallel,
        "get_model_parallel_group": lambda: None,
        "get_context_parallel_group": lambda: None,
        "get_data_parallel_group": lambda with_context_parallel=False: None,
        "get_pipeline_model_parallel_group": lambda: None,
        "get_pipeline_model_parallel_last_rank": lambda: 0,
        "is_pipeline_first_stage": lambda: True,
        "is_pipeline_last_stage": lambda: True,
    }
    names = {
        "tensor": "tensor_model_parallel",
        "pipeline": "pipeline_model_parallel",
        "context": "context_parallel",
        "data": "data_parallel",
    }
    for key, name in names.items():
        groups[f"get_{name}_rank"] = lambda: 0
        groups[f"get_{name}_world_size"] = lambda key=key: fake.sizes[key]
    return {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.parallel_state": groups,
        "megatron.core.utils": {"get_model_config": lambda part: part.config},
        "megatron.core.enums": {"ModelType": SimpleNamespace(encoder_or_decoder="decoder")},
        "megatron.core.distributed": {"finalize_model_grads": "finalize"},
        "megatron.core.pipeline_parallel": {"get_forward_backward_func": lambda: fake.run},
        "megatron.core.tensor_parallel": {
            "vocab_parallel_cross_entropy": entropy,
            "gather_from_tensor_model_parallel_region": lambda tensor: tensor,
        },
        "megatron.core.tensor_parallel.random": {
            "model_parallel_cuda_manual_seed": lambda seed: fake.calls.append(("seed", seed))
        },
        "megatron.core.transformer": {},
        "megatron.core.transformer.enums": {"AttnBackend": AttnBackend},
        "megatron.core.optimizer": {
            "get_megatron_optimizer": lambda config, model, **further: (config, model, further)
        },
        "megatron.core.optimizer.optimizer_config": {"ParamWithNamePredicate": Predicate, "ParamKey": Key},
        "megatron.training": {},
        "megatron.training.arguments": {"parse_args": fake.parse_args, "validate_args": fake.validate_args},
        "megatron.training.global_vars": {
            "get_args": fake.get_args,
            "set_global_variables": fake.set_global_variables,
            "get_timers": lambda: "timers",
            "get_tensorboard_writer": lambda: fake.writer,
        },
        "megatron.training.training": {
            "get_model": fake.get_model,
            "setup_model_and_optimizer": fake.setup_model_and_optimizer,
            "num_floating_point_operations": lambda args, batch_size: 10 * batch_size,
            "get_optimizer_param_scheduler": lambda optimizer: ("scheduler of", optimizer),
            "get_megatron_optimizer_config": lambda args: (
                "config",
                {"biases": {"wd_mult": 0.0}, "rates": {"max_lr": 1.0}},
            ),
        },
        "megatron.training.checkpointing": {
            "save_checkpoint": fake.save_checkpoint,
            "load_checkpoint": fake.load_checkpoint,
            "checkpoint_exists": lambda folder: folder in fake.checkpoints,
        },
        "megatron.training.utils": {
            "logical_and_across_model_parallel_group": lambda flag: flag,
            "reduce_max_stat_across_model_parallel_group": lambda stat: stat,
            "report_memory": lambda name: fake.calls.append(("report_memory", name)),
        },
    }


def install(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in modules(fake).items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, states: Any) -> Iterator[Fake]:
    """Megatron-LM, and a CUDA device to run it on."""
    found = Fake()
    install(found, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    yield found
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Model(nn.Module):
    """What a user passes: only its configuration counts."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(
            **{
                "model_type": "gpt2",
                "n_layer": 2,
                "n_embd": 8,
                "n_head": 2,
                "n_positions": 32,
                "vocab_size": VOCABULARY,
                "eos_token_id": 0,
                **config,
            }
        )


def samples(number: int = 8) -> Any:
    return [
        {"input_ids": torch.arange(1, LENGTH + 1) + row % 8, "labels": torch.arange(1, LENGTH + 1) + row % 8}
        for row in range(number)
    ]


Start = Callable[..., tuple[Any, Any, Any, Any, Any]]


@pytest.fixture
def start(fake: Fake) -> Start:
    """Prepare a run: accelerator, model, optimizer, scheduler, loader."""

    def start(batch: int = 2, rows: int = 8, **fields: Any) -> tuple[Any, Any, Any, Any, Any]:
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**fields))
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)
        loader = torch.utils.data.DataLoader(samples(rows), batch_size=batch)
        return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))

    return start
