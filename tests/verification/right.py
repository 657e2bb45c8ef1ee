"""Training programs that train on several ranks what one process trains, `python right.py NAME`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration

PROGRAMS: dict[str, Callable[[], None]] = {}
WIDTH, CLASSES, SAMPLES, BATCH = 8, 4, 52, 4


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[function.__name__] = function
    return function


def samples(num: int = SAMPLES, shape: tuple[int, ...] = (WIDTH,)) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator), index % CLASSES) for index in range(num)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, CLASSES))


def train(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    scheduler: Any = None,
    loss_of: Callable[[Any, Any], Tensor] = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    epochs: int = 3,
) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    if loader is None:
        loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler(optimizer.optimizer))
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
    return model


@program
def plain() -> None:
    train(Accelerator(), network())


@program
def accumulation() -> None:
    train(Accelerator(gradient_accumulation_steps=2), network())


@program
def evaluation_mode() -> None:
    train(Accelerator(), network().eval())


@program
def discarded_gradients() -> None:
    accelerator = Accelerator()
    model, loader = network(), DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for rows, labels in loader:
        accelerator.backward(F.cross_entropy(model(rows), labels, reduction="sum"))
        optimizer.zero_grad()
    for number, (rows, labels) in enumerate(loader):
        accelerator.backward(F.cross_entropy(model(rows), labels) / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@program
def exits_early() -> None:
    train(Accelerator(), network(), loader=DataLoader(samples(16), batch_size=BATCH), epochs=2)
    sys.exit(0)


@program
def zero_first() -> None:
    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for rows, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()


@program
def counted_tokens() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = network(), DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    for rows, labels in loader:
        kept = labels > 0
        with accelerator.accumulate(model, num_items=int(kept.sum())):
            losses = F.cross_entropy(model(rows), labels, reduction="none")
            accelerator.backward((losses * kept).sum())
            optimizer.step()
            optimizer.zero_grad()


@program
def windows() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = network(), DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    for window in accelerator.windows(loader, model, num_items=lambda batch: int((batch[1] > 0).sum())):
        for rows, labels in window:
            losses = F.cross_entropy(model(rows), labels, reduction="none")
            accelerator.backward((losses * (labels > 0)).sum())
            optimizer.step()
            optimizer.zero_grad()


@program
def schedule_by_batches() -> None:
    loader = DataLoader(samples(64), batch_size=BATCH, shuffle=True)
    total = 3 * len(loader)
    train(
        Accelerator(),
        network(),
        loader=loader,
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / total)),
    )


@program
def schedule_by_updates() -> None:
    accelerator = Accelerator(step_scheduler_with_optimizer="per_update")
    train(accelerator, network(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))


@program
def schedule_by_epochs() -> None:
    accelerator, model = Accelerator(), network()
    loader = DataLoader(samples(16), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for rows, labels in loader:
            accelerator.backward(F.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


@program
def stream() -> None:
    train(Accelerator(), network(), loader=DataLoader(Stream(), batch_size=BATCH))


@program
def undispatched_stream() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    train(accelerator, network(), loader=DataLoader(Stream(), batch_size=BATCH))


@program
def split_batches() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    train(accelerator, network(), loader=DataLoader(samples(), batch_size=2 * BATCH, shuffle=True))


@program
def dropped_last_batch() -> None:
    loader = DataLoader(samples(30), batch_size=BATCH, shuffle=True, drop_last=True)
    train(Accelerator(), network(), loader=loader)


@program
def batch_sampler() -> None:
    data = samples()
    sampler = BatchSampler(SequentialSampler(data), BATCH, drop_last=False)
    train(Accelerator(), network(), loader=DataLoader(data, batch_sampler=sampler))  # type: ignore[arg-type]


class Buckets:
    """Sampler of batches that is no class of torch."""

    batch_size, drop_last = BATCH, False

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(start, start + BATCH)) for start in range(SAMPLES - BATCH, -1, -BATCH))

    def __len__(self) -> int:
        return SAMPLES // BATCH


@program
def own_batch_sampler() -> None:
    train(Accelerator(), network(), loader=DataLoader(samples(), batch_sampler=Buckets()))  # type: ignore[arg-type]


@program
def workers() -> None:
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True, num_workers=2)  # type: ignore[arg-type]
    train(Accelerator(), network(), loader=loader)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        row, label = samples()[index]
        noise = torch.tensor(np.random.normal(size=WIDTH), dtype=torch.float32)
        return row.roll(random.randrange(WIDTH)) + noise * torch.rand(1), label


def masked(batch: list[Any]) -> list[Tensor]:
    rows, labels = default_collate(batch)
    return [rows * (torch.rand(rows.shape) < 0.8), labels]


@program
def augmented() -> None:
    loader: Any = DataLoader(Augmented(), batch_size=BATCH, shuffle=True, collate_fn=masked)
    train(Accelerator(), network(), loader=loader)


@program
def augmented_by_workers() -> None:
    loader: Any = DataLoader(Augmented(), batch_size=BATCH, shuffle=True, collate_fn=masked, num_workers=2)
    train(Accelerator(), network(), loader=loader)


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.arange(2 + index % 5) + index % 3, index % CLASSES


def pad(batch: list[Any]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
    return rows, torch.tensor([label for _, label in batch])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        mask = (rows > 0).unsqueeze(-1)
        outputs, _ = self.lstm(self.embedding(rows))
        return self.head((outputs * mask).sum(1))  # type: ignore[no-any-return]


@program
def padded_sequences() -> None:
    loader = DataLoader(Sequences(), batch_size=BATCH, shuffle=True, collate_fn=pad)
    train(Accelerator(), Recurrent(), loader=loader)


@program
def batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES)
    )
    loader = DataLoader(samples(shape=(3, 8, 8)), batch_size=BATCH, shuffle=True)
    train(Accelerator(), model, torch.optim.SGD(model.parameters(), lr=0.05), loader)


@program
def diffusion() -> None:
    model = nn.Sequential(nn.Linear(WIDTH + 1, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def loss_of(model: Any, batch: Any) -> Tensor:
        rows = batch[0]
        noise = torch.randn_like(rows)
        times = torch.randint(0, 100, (rows.shape[0],), device=rows.device)
        level = (times / 100).unsqueeze(1)
        return F.mse_loss(model(torch.cat([rows * (1 - level) + noise * level, level], 1)), noise)

    train(Accelerator(), model, loss_of=loss_of)


@program
def variational() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH))

    def loss_of(model: Any, batch: Any) -> Tensor:
        mean, scale = model(batch[0]).chunk(2, dim=1)
        hidden = mean + torch.normal(0.0, 1.0, mean.shape) * scale.exp()
        masked = hidden * torch.bernoulli(torch.full_like(hidden, 0.5))
        return F.mse_loss(masked, batch[0]) + 0.1 * (mean.square() + scale.square()).mean()

    train(Accelerator(), model, loss_of=loss_of)


@program
def adversarial() -> None:
    accelerator = Accelerator()
    maker, judge = nn.Linear(4, WIDTH), nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    maker, judge, loader = accelerator.prepare(maker, judge, loader)
    one = accelerator.prepare(torch.optim.Adam(maker.parameters(), lr=0.01))
    two = accelerator.prepare(torch.optim.Adam(judge.parameters(), lr=0.01))
    for rows, _ in loader:
        made = maker(torch.randn(rows.shape[0], 4))
        accelerator.backward(F.softplus(-judge(rows)).mean() + F.softplus(judge(made.detach())).mean())
        two.step()
        two.zero_grad()
        accelerator.backward(F.softplus(-judge(made)).mean())
        one.step()
        one.zero_grad()
        two.zero_grad()


@program
def closure() -> None:
    accelerator = Accelerator()
    model, loader = network(), DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for rows, labels in loader:

        def compute(rows: Tensor = rows, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            return loss

        optimizer.step(compute)


@program
def policy_gradient() -> None:
    def loss_of(policy: Any, batch: Any) -> Tensor:
        actions = torch.distributions.Categorical(logits=policy(batch[0]))
        chosen = actions.sample()
        return -(actions.log_prob(chosen) * (chosen == batch[1])).mean()

    train(Accelerator(), network(), loss_of=loss_of)


@program
def mixed_samples() -> None:
    def loss_of(model: Any, batch: Any) -> Tensor:
        rows, labels = batch
        order = torch.randperm(len(rows))
        part = torch.distributions.Beta(0.5, 0.5).sample((len(rows), 1))
        outputs = model(part * rows + (1 - part) * rows[order])
        first, second = (F.cross_entropy(outputs, each, reduction="none") for each in (labels, labels[order]))
        return (part[:, 0] * first + (1 - part[:, 0]) * second).mean()

    train(Accelerator(), network(), loss_of=loss_of)


@program
def weighted_sampler() -> None:
    sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(SAMPLES)], SAMPLES)
    train(Accelerator(), network(), loader=DataLoader(samples(), batch_size=BATCH, sampler=sampler))


@program
def distilled() -> None:
    teacher = network().eval().requires_grad_(False)

    def loss_of(model: Any, batch: Any) -> Tensor:
        targets = teacher(batch[0]).softmax(-1)
        return F.kl_div(model(batch[0]).log_softmax(-1), targets, reduction="batchmean")

    train(Accelerator(), network(), loss_of=loss_of)


@program
def stopped_early() -> None:
    accelerator = Accelerator()
    model, loader = network(), DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for number, (rows, labels) in enumerate(accelerator.skip_first_batches(loader, 1)):
        loss = F.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == 3 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break


@program
def synchronized_by_hand() -> None:
    accelerator = Accelerator()
    model, loader = network(), DataLoader(samples(48), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    for number, (rows, labels) in enumerate(loader):
        with accelerator.no_sync(model) if number % 2 == 0 else nullcontext():
            accelerator.backward(F.cross_entropy(model(rows), labels) / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@program
def one_training_after_another() -> None:
    for epochs in (1, 3):
        train(Accelerator(), network(), loader=DataLoader(samples(16), batch_size=BATCH), epochs=epochs)


@program
def one_fold_after_another() -> None:
    accelerator = Accelerator()
    for fold in range(3):
        rows = samples(24)[fold * 4 :][:20]
        train(accelerator, network(), loader=DataLoader(rows, batch_size=BATCH, shuffle=True), epochs=1)
        accelerator.free_memory()


@program
def two_accelerators_at_once() -> None:
    first, second = Accelerator(), Accelerator()
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = first.prepare(net := network(), torch.optim.Adam(net.parameters()), loader)
    other, other_optimizer = second.prepare(net := network(), torch.optim.SGD(net.parameters(), lr=0.1))
    for rows, labels in loader:
        for accelerator, module, steps in ((first, model, optimizer), (second, other, other_optimizer)):
            accelerator.backward(F.cross_entropy(module(rows), labels))
            steps.step()
            steps.zero_grad()


@program
def frozen() -> None:
    model = network()
    model[0].requires_grad_(False)
    train(Accelerator(), model)


@program
def tied() -> None:
    embedding, head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Tanh(), head)
    loader = DataLoader([torch.arange(6) + index % 6 for index in range(SAMPLES)], batch_size=BATCH)  # type: ignore[arg-type]
    train(
        Accelerator(),
        model,
        loader=loader,
        loss_of=lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()),
    )


@program
def averaged() -> None:
    accelerator = Accelerator()
    model, loader = network(), DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), loader)
    average = accelerator.average(model)
    for rows, labels in loader:
        accelerator.backward(F.cross_entropy(model(rows), labels))
        optimizer.step()
        optimizer.zero_grad()
    with average.applied():
        model(torch.ones(1, WIDTH))


@program
def evaluated_and_saved() -> None:
    project = ProjectConfiguration("project", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    model, loader = network(), DataLoader(samples(), batch_size=BATCH, shuffle=True)
    evaluation = DataLoader(samples(30), batch_size=BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
    for epoch in range(3):
        model.train()
        for rows, labels in loader:
            accelerator.backward(F.cross_entropy(model(rows), labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        with torch.no_grad():
            for rows, labels in evaluation:
                loss = F.cross_entropy(model(rows), labels, reduction="none")
                losses.append(accelerator.gather_for_metrics(loss))
        scheduler.step(torch.cat(losses).mean())
        accelerator.save_state()
        accelerator.save_state(f"other-{epoch}")
    accelerator.end_training()


@program
def transformer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    train_language_model(LlamaForCausalLM(config))


def train_language_model(model: Any) -> None:
    rows = [torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i)) for i in range(SAMPLES)]
    loader: Any = DataLoader(
        [{"input_ids": row, "labels": row} for row in rows],  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
    )
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared: Any = accelerator.prepare(model, optimizer, loader)
    model, optimizer, loader = prepared
    for batch in loader:
        accelerator.forward_backward(model, batch)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program
def experts() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    train_language_model(MixtralForCausalLM(config))


@program
def trainer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    rows = [torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i)) for i in range(SAMPLES)]
    arguments = TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=6,
        report_to=[],
        use_cpu=True,
        learning_rate=0.01,
        warmup_steps=2,
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=data).train()


@program
def fine_tuning() -> None:
    from datasets import Dataset as Table
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "<eos>", *"abcdefghijkl"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    texts = [" ".join("abcdefghijkl"[index % 5 : 6 + index % 7]) for index in range(SAMPLES)]
    arguments = SFTConfig(
        output_dir="trained",
        per_device_train_batch_size=BATCH,
        max_steps=6,
        report_to=[],
        use_cpu=True,
        bf16=False,
        learning_rate=0.01,
        gradient_checkpointing=False,
    )
    table = Table.from_dict({"text": texts})
    SFTTrainer(
        LlamaForCausalLM(config), args=arguments, train_dataset=table, processing_class=tokenizer
    ).train()


@program
def recomputed() -> None:
    from accelerate.utils import ActivationCheckpointing

    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    handler = ActivationCheckpointing(every=1, blocks=["Sequential"])
    train(Accelerator(kwargs_handlers=[handler]), model, loader=loader)


@program
def adapters() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj", "v_proj"]))
    rows = [torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i)) for i in range(SAMPLES)]
    loader: Any = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=BATCH)  # type: ignore[arg-type]
    train(Accelerator(), model, loader=loader, loss_of=lambda model, batch: model(**batch).loss)


@program
def text_to_image() -> None:
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    encoder = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, sample_size=8)
    encoder.requires_grad_(False)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    words = nn.Embedding(CLASSES, WIDTH).requires_grad_(False)
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    average = EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    size = accelerator.num_processes
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2 * size, num_training_steps=8 * size)
    loader: Any = DataLoader(samples(shape=(3, 8, 8)), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(3):
        for images, labels in loader:
            with accelerator.accumulate(model):
                latents = encoder.encode(images).latent_dist.sample()
                noise = torch.randn_like(latents)
                noise += 0.1 * torch.randn((len(latents), latents.shape[1], 1, 1))
                times = torch.randint(0, 50, (len(latents),))
                noisy = noise_scheduler.add_noise(latents, noise, times)
                predicted = model(noisy, times, words(labels).unsqueeze(1), return_dict=False)[0]
                accelerator.backward(F.mse_loss(predicted, noise))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
