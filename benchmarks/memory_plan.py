"""The memory that `plan_memory` predicts for a training step, beside that of a step that runs.

The step that runs is that of a training loop: a prepared model, optimizer and loader, `accumulate`,
`backward`, clipping and the optimizer, with real tensors on the CPU. It is measured by the allocations that
torch's profiler records, which include those inside of operations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from accelerate import Accelerator, planning
from accelerate.state import AcceleratorState, GradientState
from pairing import Pair, report

BUDGET = 5.0
"""Percent by which a prediction may differ from the allocations."""
Batch = dict[str, Tensor]


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.SiLU(),
            nn.Conv2d(out, out, 3, padding=1),
        )
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.skip(image) + self.layers(image)


class UNet(nn.Module):
    """Three resolutions down and up again, with connections between them, as denoising models have."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip(widths, widths[1:], strict=False))
        self.down = nn.ModuleList(Block(narrow, wide) for narrow, wide in pairs)
        self.middle = Block(widths[-1], widths[-1])
        self.up = nn.ModuleList(Block(2 * wide, narrow) for narrow, wide in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        x, kept = self.first(images + noise), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], dim=1))
        return nn.functional.mse_loss(self.last(x), noise)


def text(batch: int = 8, length: int = 128, **others: Tensor) -> Batch:
    ids = torch.randint(0, 1000, (batch, length))
    return {"input_ids": ids, "labels": ids.clone(), **others}


def images(size: int, batch: int = 8, **others: Tensor) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, size, size), **others}


def of_config(model: str, config: str, **sizes: Any) -> nn.Module:
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


WORDS = {"vocab_size": 8000, "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 6}
CLIP = {
    "text_config": {**WORDS, "intermediate_size": 1024},
    "vision_config": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "image_size": 64,
                      "patch_size": 8, "num_attention_heads": 4},
}  # fmt: skip
WHISPER = {"vocab_size": 8000, "d_model": 256, "encoder_layers": 4, "decoder_layers": 4,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 80,
           "max_source_positions": 200, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2,
           "bos_token_id": 1}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "Llama": (
        partial(of_config, "LlamaForCausalLM", "LlamaConfig", **WORDS, intermediate_size=704),
        text,
    ),
    "GPT-2": (
        partial(of_config, "GPT2LMHeadModel", "GPT2Config", vocab_size=8000, n_embd=256, n_layer=6, n_head=4),
        text,
    ),
    "BERT": (partial(of_config, "BertForMaskedLM", "BertConfig", **WORDS, intermediate_size=1024), text),
    "DistilBERT classifier": (
        partial(of_config, "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=8000,
                dim=256, hidden_dim=1024, n_heads=4),
        lambda: {**text(), "labels": torch.zeros(8, dtype=torch.long)},
    ),
    "T5": (
        partial(of_config, "T5ForConditionalGeneration", "T5Config", vocab_size=8000, d_model=256, d_ff=1024,
                d_kv=64, num_heads=4, num_layers=4, decoder_start_token_id=0),
        text,
    ),
    "ViT": (
        partial(of_config, "ViTForImageClassification", "ViTConfig", hidden_size=256, intermediate_size=1024,
                num_hidden_layers=6, num_attention_heads=4, image_size=64, patch_size=8),
        lambda: images(64, labels=torch.zeros(8, dtype=torch.long)),
    ),
    "ResNet": (
        partial(of_config, "ResNetForImageClassification", "ResNetConfig", depths=[2, 2, 2, 2],
                hidden_sizes=[64, 128, 256, 512], embedding_size=64),
        lambda: images(64, labels=torch.zeros(8, dtype=torch.long)),
    ),
    "UNet": (UNet, lambda: {"images": torch.randn(4, 3, 64, 64), "noise": torch.randn(4, 3, 64, 64)}),
    "CLIP": (
        partial(of_config, "CLIPModel", "CLIPConfig", **CLIP),
        lambda: images(64, input_ids=torch.randint(3, 1000, (8, 64))),
    ),
    "Whisper": (
        partial(of_config, "WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        lambda: {"input_features": torch.randn(8, 80, 400), "labels": torch.randint(3, 1000, (8, 64))},
    ),
}  # fmt: skip


ARGUMENTS = {"CLIP": {"return_loss": True}}
"""Further arguments of the forward pass, by model."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    model: str
    precision: str = "no"
    optimizer: str = "AdamW"
    checkpointing: bool = False
    accumulation: int = 1

    @property
    def name(self) -> str:
        parts = [self.model, self.optimizer, *(["bf16"] if self.precision == "bf16" else [])]
        parts += ["checkpointing"] * self.checkpointing
        return ", ".join([*parts, *([f"accumulation {self.accumulation}"] * (self.accumulation > 1))])


CASES = [
    *map(Case, MODELS),
    *(Case(model, precision="bf16") for model in ("Llama", "BERT", "ViT", "UNet")),
    *(Case(model, optimizer="SGD") for model in ("Llama", "T5")),
    *(Case(model, checkpointing=True) for model in ("Llama", "T5", "ViT")),
    *(Case(model, accumulation=4) for model in ("Llama", "BERT", "ResNet")),
    Case("Llama", precision="bf16", checkpointing=True, accumulation=4),
]


@dataclass
class Run:
    """A prepared run of a case."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    arguments: Mapping[str, Any]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        output = model(**batch, **self.arguments)
        return output if isinstance(output, Tensor) else output.loss


def start(case: Case) -> Run:
    torch.manual_seed(0)
    for state in (AcceleratorState, GradientState):
        state._reset_state(True) if state is AcceleratorState else state._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision=case.precision, gradient_accumulation_steps=case.accumulation
    )
    build, batch_of = MODELS[case.model]
    model = build()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-4)
    return Run(accelerator, model, optimizer, batch_of(), ARGUMENTS.get(case.model, {}))


def predict(case: Case) -> planning.MemoryPlan:
    run = start(case)
    return run.accelerator.plan_memory(run.model, run.optimizer, run.batch, run.loss)


def train(case: Case, steps: int) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """Run steps of a training loop; yields before each forward pass, and once at the end."""
    run = start(case)
    size = next(iter(run.batch.values())).shape[0]
    samples = [{name: tensor[index] for name, tensor in run.batch.items()} for index in range(size)]
    loader: Any = DataLoader(samples * (steps * case.accumulation), batch_size=size)  # type: ignore[arg-type]
    model, optimizer, loader = run.accelerator.prepare(run.model, run.optimizer, loader)
    del run.batch, samples
    for batch in loader:
        yield model, optimizer
        with run.accelerator.accumulate(model):
            loss = run.loss(model, batch)
            run.accelerator.backward(loss)
            if run.accelerator.sync_gradients:
                run.accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    yield model, optimizer


def record_allocations(case: Case) -> int:
    """Return the peak of a step by the allocations and frees that torch's profiler records."""
    steps = train(case, 3)
    for _ in range(case.accumulation + 1):
        model, optimizer = next(steps)
    states = [
        each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)
    ]
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *states))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(case.accumulation):
            next(steps)
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    peak = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return held + peak


def compare(case: Case) -> Pair:
    plan, allocated = predict(case), record_allocations(case)
    error = 100 * abs(plan.peak - allocated) / allocated
    # Workspaces of convolutions on this CPU are allocated, but not a part of the predicted peak.
    budget = BUDGET + 100 * plan.workspace / allocated
    return Pair(case.name, allocated, plan.peak, error, budget, "%", "B")


def main() -> int:
    return report([compare(case) for case in CASES], "Memory plan (raw: allocated, ours: predicted)")


if __name__ == "__main__":
    sys.exit(main())
