"""Training programs with one fault each, which train something else on two ranks, `python faults.py NAME`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import right
import torch
from right import BATCH, CLASSES, WIDTH, network, samples
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, PartialState


class Fault(NamedTuple):
    run: Callable[[], None]
    what: str  # the kind of the first difference
    cause: str  # a part of the text of the difference or its cause


FAULTS: dict[str, Fault] = {}
WHOLE_BATCH = 2 * BATCH


def fault(what: str, cause: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        FAULTS[function.__name__] = Fault(function, what, cause)
        return function

    return add


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    accelerator: Accelerator | None = None,
    model: Any = None,
    loss_of: Callable[[Any, Any], Tensor] = cross_entropy,
    loader: Any = None,
    before_step: Callable[[Accelerator, Any, Any], Any] = lambda *_: None,
    after_step: Callable[[Accelerator, Any, Any], Any] = lambda *_: None,
    lr: float = 0.1,
    **others: Any,
) -> None:
    accelerator = accelerator or Accelerator(**others)
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if loader is None:
        loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            before_step(accelerator, model, optimizer)
            optimizer.step()
            after_step(accelerator, model, optimizer)
            optimizer.zero_grad()


@fault("error", "backward pass did not average gradients")
def gradients_are_not_synchronized() -> None:
    accelerator = Accelerator()
    model, loader = network(), DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for batch in loader:
        with accelerator.no_sync(model):
            accelerator.backward(cross_entropy(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@fault("gradient norm", "not averaged over the ranks")
def a_parameter_is_not_synchronized() -> None:
    model = network()
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    train(model=model)


@fault("loss", "one that the script has divided itself")
def the_loader_is_sharded_twice() -> None:
    accelerator = Accelerator()
    data, size, rank = samples(), accelerator.num_processes, accelerator.process_index
    part = data[rank::size]
    train(accelerator, loader=DataLoader(part, batch_size=BATCH))  # type: ignore[arg-type]


@fault("error", "do not fit the run")
def a_sampler_of_the_user_skips_samples() -> None:
    accelerator = Accelerator()
    data = samples()
    sampler = DistributedSampler(data, 4, accelerator.process_index, shuffle=False)  # type: ignore[arg-type]
    train(accelerator, loader=DataLoader(data, batch_size=BATCH, sampler=sampler))  # type: ignore[arg-type]


class ShuffledStream(right.Stream):
    def __iter__(self) -> Iterator[Any]:
        rows = list(super().__iter__())
        random.Random(PartialState().process_index).shuffle(rows)
        return iter(rows)


@fault("error", "begins with different samples on different ranks")
def the_order_of_a_stream_depends_on_the_rank() -> None:
    config = DataLoaderConfiguration(dispatch_batches=False)
    train(loader=DataLoader(ShuffledStream(), batch_size=BATCH), dataloader_config=config)


@fault("samples", "read samples")
def both_ranks_read_the_same_samples() -> None:
    accelerator = Accelerator()
    loader: Any = DataLoader(samples(), batch_size=BATCH)
    loader = accelerator.prepare(loader)
    if accelerator.num_processes > 1:
        shard = loader.base_dataloader.batch_sampler
        shard.process_index = 0
    train(accelerator, loader=loader)


@fault("error", "must be the same on all ranks")
def the_order_depends_on_the_rank() -> None:
    accelerator = Accelerator()
    order = torch.randperm(52, generator=torch.Generator().manual_seed(accelerator.process_index)).tolist()
    train(accelerator, loader=DataLoader(samples(), batch_size=BATCH, sampler=order))  # type: ignore[arg-type]


@fault("loss", "divided by the number of processes")
def the_loss_is_divided_twice() -> None:
    size = Accelerator().num_processes
    train(loss_of=lambda model, batch: cross_entropy(model, batch) / size)


@fault("loss", "2 times")
def the_loss_is_multiplied_by_the_number_of_processes() -> None:
    size = Accelerator().num_processes
    train(loss_of=lambda model, batch: cross_entropy(model, batch) * size)


@fault("loss", "a sum over the batch of one rank")
def the_loss_is_a_sum() -> None:
    train(loss_of=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), lr=0.01)


@fault("loss", "number of tokens")
def the_mean_is_over_tokens_of_one_rank() -> None:
    def loss_of(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1].masked_fill(batch[0][:, 0] > 0, -100))

    train(loss_of=loss_of)


@fault("loss", "negatives of the batch")
def negatives_are_those_of_one_rank() -> None:
    def loss_of(model: Any, batch: Any) -> Tensor:
        rows = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(5 * rows @ rows.T, torch.arange(len(rows)))

    train(loss_of=loss_of)


@fault("loss", "`2`")
def a_layer_has_another_scale() -> None:
    accelerator, model = Accelerator(), network()
    if accelerator.num_processes > 1:
        model[2].register_forward_hook(lambda module, inputs, output: output * 1.05)
    train(accelerator, model)


@fault("error", "Ranks have different weights")
def weights_change_after_prepare() -> None:
    accelerator, model = Accelerator(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        if number == 2 and accelerator.process_index == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(1.1)
        accelerator.backward(cross_entropy(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@fault("loss")
def labels_are_shifted_on_one_rank() -> None:
    rank = Accelerator().process_index
    train(loss_of=lambda model, batch: F.cross_entropy(model(batch[0]), (batch[1] + rank) % CLASSES))


@fault("loss")
def inputs_are_scaled_on_one_rank() -> None:
    rank = Accelerator().process_index
    train(loss_of=lambda model, batch: cross_entropy(model, (batch[0] * (1 + rank), batch[1])))


@fault("loss")
def noise_depends_on_the_number_of_processes() -> None:
    size = Accelerator().num_processes
    train(loss_of=lambda model, batch: cross_entropy(model, (batch[0] + 0.1 * (size - 1), batch[1])))


@fault("gradient norm", "Only this launch has a gradient of `3.weight`")
def a_frozen_parameter_trains() -> None:
    accelerator, model = Accelerator(), network()
    model[3].weight.requires_grad_(accelerator.num_processes > 1)
    accelerator.wait_for_everyone()
    train(accelerator, model)


@fault("gradient norm", "Only the reference has a gradient of `3.weight`")
def a_parameter_is_frozen() -> None:
    accelerator, model = Accelerator(), network()
    model[3].weight.requires_grad_(accelerator.num_processes == 1)
    train(accelerator, model)


@fault("learning rate", "for each step of the optimizer")
def the_scheduler_steps_twice() -> None:
    right.train(Accelerator(), network(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))


@fault("learning rate", "number of processes")
def the_learning_rate_is_scaled() -> None:
    size = Accelerator().num_processes
    train(lr=0.1 * size)


@fault("gradient norm", "clips")
def one_rank_clips() -> None:
    def clip(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        if accelerator.num_processes > 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    train(before_step=clip)


@fault("gradient norm", "1/2")
def gradients_are_scaled_by_hand() -> None:
    def scale(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1.0 / accelerator.num_processes)

    train(before_step=scale)


@fault("loss", "`0`")
def weight_decay_is_applied_twice() -> None:
    def decay(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        if accelerator.num_processes > 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.97)

    train(after_step=decay)


@fault("loss", "`0`")
def the_optimizer_steps_twice() -> None:
    def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        if accelerator.num_processes > 1:
            optimizer.optimizer.step()

    train(after_step=step)


@fault("gradient norm", "clears")
def gradients_are_not_cleared() -> None:
    accelerator, model = Accelerator(), network()
    loader = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for batch in loader:
        accelerator.backward(cross_entropy(model, batch))
        optimizer.step()
        if accelerator.num_processes == 1:
            optimizer.zero_grad()


@fault("loss", "1/2")
def accumulation_divides_by_another_number() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    factor = 2 if accelerator.num_processes > 1 else 1
    right.train(accelerator, network(), loss_of=lambda model, batch: cross_entropy(model, batch) / factor)


@fault("samples", "micro-batches")
def accumulation_is_longer() -> None:
    size = Accelerator().num_processes
    right.train(Accelerator(gradient_accumulation_steps=size), network())


@fault("error", "Ranks have different weights")
def the_main_process_changes_weights() -> None:
    def change(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        if accelerator.num_processes > 1 and accelerator.is_main_process:
            with torch.no_grad():
                next(model.parameters()).add_(0.02)

    train(after_step=change)


@fault("loss", "the model")
def buffers_drift() -> None:
    class Counting(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, rows: Tensor) -> Tensor:
            self.scale += 0.001 * len(rows)
            return self.layer(rows) * self.scale  # type: ignore[no-any-return]

    train(model=Counting(), kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


@fault("loss")
def one_layout_computes_in_bfloat16() -> None:
    size = Accelerator().num_processes

    def loss_of(model: Any, batch: Any) -> Tensor:
        context: Any = torch.autocast("cpu", torch.bfloat16) if size > 1 else nullcontext()
        with context:
            return cross_entropy(model, batch)

    train(loss_of=loss_of)


@fault("loss", "No batch of a prepared loader")
def the_loader_is_not_prepared() -> None:
    accelerator, model = Accelerator(), network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in DataLoader(samples(400), batch_size=BATCH):
        accelerator.backward(cross_entropy(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@fault("settings", "weight_decay of the optimizer is 0.2, and 0.1")
def weight_decay_depends_on_the_number_of_processes() -> None:
    accelerator, model = Accelerator(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1 * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=BATCH))
    for batch in loader:
        accelerator.backward(cross_entropy(model, batch))
        optimizer.step()
        optimizer.zero_grad()


@fault("loss", "other inputs than in the reference for the same samples")
def an_augmentation_depends_on_the_rank() -> None:
    def loss_of(model: Any, batch: Any) -> Tensor:
        rows = batch[0].roll(PartialState().process_index, dims=1)
        return F.cross_entropy(model(rows), batch[1])

    train(loss_of=loss_of)


@fault("loss", "pad their batches to other lengths")
def the_loss_is_a_mean_over_tokens_of_padded_batches() -> None:
    def collate(rows: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)

    def loss_of(model: Any, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids.clamp(min=0)).flatten(0, 1), ids.flatten())

    rows = [torch.arange(2 + index % 5) % 12 for index in range(64)]
    model = nn.Sequential(nn.Embedding(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12))
    loader: Any = DataLoader(rows, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
    train(model=model, loss_of=loss_of, loader=loader)


@fault("error", "a change on some ranks only")
def gradients_are_changed_on_one_rank() -> None:
    def halve(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        if accelerator.num_processes > 1 and accelerator.is_main_process:
            for parameter in model.parameters():
                parameter.grad *= 0.5

    train(before_step=halve)


@fault("error", "its learning rates were")
def a_schedule_uses_the_loss_of_one_rank() -> None:
    def lower(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + accelerator.process_index)

    train(after_step=lower)


@fault("gradient norm", "gather() passes no gradients")
def the_loss_uses_gathered_outputs() -> None:
    accelerator = Accelerator()

    def loss_of(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0])
        everyone = list(accelerator.gather(outputs.detach()).split(len(outputs)))
        everyone[accelerator.process_index] = outputs
        return F.cross_entropy(torch.cat(everyone), accelerator.gather(batch[1]))

    train(accelerator, loss_of=loss_of)


@fault("steps")
def one_layout_stops_earlier() -> None:
    accelerator, model = Accelerator(), network()
    loader = DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for number, batch in enumerate(loader):
        accelerator.backward(cross_entropy(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if number * accelerator.num_processes >= 4:
            break


class NoiseOfRank(right.Augmented):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(PartialState().process_index)

    def __getitem__(self, index: int) -> Any:
        row, label = samples()[index]
        return row + torch.tensor(self.generator.normal(size=WIDTH), dtype=torch.float32), label


@fault("loss", "it has a generator of its own")
def the_augmentation_has_a_generator_for_each_rank() -> None:
    Accelerator()
    train(loader=DataLoader(NoiseOfRank(), batch_size=BATCH))


class ScaledByRank(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * (1 + PartialState().process_index)


@fault("loss", "The outputs of `1` of model 1 are the first that differ")
def the_second_training_has_a_layer_that_depends_on_the_rank() -> None:
    train(loader=DataLoader(samples(16), batch_size=BATCH))
    train(model=nn.Sequential(nn.Linear(WIDTH, CLASSES), ScaledByRank()))


if __name__ == "__main__":
    FAULTS[sys.argv[1]].run()
