"""Models as users write them train in a pipeline as on one process, or raise one error on all ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, PreparationError, StateError, is_torch_version
from accelerate.utils import PipelineConfig

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]


def tower(
    layer: Callable[[], nn.Module], call: Callable[..., Any], unpack: Callable[[Any], Any]
) -> nn.Module:
    """Returns a net whose forward calls four layers, each by `call`, and returns their unpacked output."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(4))

        def forward(self, hidden: Any) -> Any:
            for part in self.layers:
                hidden = call(part, hidden)
            return unpack(hidden)

    return Tower()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(self.norm(hidden)))
        return result


class Caching(Layer):
    """Layer that caches tensors in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None
        self.by_size: dict[int, Tensor] = {}

    def forward(self, hidden: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = self.by_size[4] = torch.arange(1.0, 5.0)
        return super().forward(hidden) * self.scale + self.by_size[4]


@dataclass
class Hidden:
    value: Tensor
    depth: int = 0


class OfDataclasses(Layer):
    def forward(self, hidden: Any) -> Any:
        if isinstance(hidden, Tensor):
            hidden = Hidden(hidden)
        return Hidden(super().forward(hidden.value), hidden.depth + 1)


class InPlace(Layer):
    """Layer that changes its argument."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(0.5))


class Object:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class OfObjects(Layer):
    def forward(self, hidden: Any) -> Any:
        return Object(super().forward(hidden.value if isinstance(hidden, Object) else hidden))


class Complex(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        real = super().forward(hidden.real if hidden.is_complex() else hidden)
        return torch.complex(real, 0.5 * real)


class WithAttribute(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        self.penalty = hidden.square().mean()
        return super().forward(hidden)


class Detaching(nn.Module):
    """Net whose last stage gets gradients for its last layer only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, hidden: Tensor) -> Tensor:
        for position, part in enumerate(self.layers):
            hidden = part(hidden).detach() if position == 6 else hidden + part(hidden)
        return hidden


class Skipping(Detaching):
    """Net that uses the outputs of all layers, which the backward pass of tanh needs, too."""

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = []
        for part in self.layers:
            hidden = torch.tanh(part(hidden))
            outputs.append(hidden)
        return torch.stack(outputs).mean(0)


def call(part: nn.Module, hidden: Any) -> Any:
    return part(hidden)


def call_with_lengths(part: nn.Module, hidden: Tensor) -> Any:
    return part(hidden, torch.ones(len(hidden), dtype=torch.int64))


def call_in_checkpoint(part: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda value: value * part(value) + value, hidden, use_reentrant=False)
    return hidden + result


def call_in_reentrant_checkpoint(part: nn.Module, hidden: Tensor) -> Tensor:
    result: Tensor = checkpoint(part, hidden, use_reentrant=True)
    return result


def keep(output: Any) -> Any:
    return output


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "checkpoint": lambda: tower(Layer, call_in_checkpoint, keep),
    "cache": lambda: tower(Caching, call, keep),
    "dataclass": lambda: tower(OfDataclasses, call, lambda hidden: hidden.value * hidden.depth),
    "in place": lambda: tower(InPlace, lambda part, hidden: part(1.0 * hidden), keep),
    "detached": Detaching,
    "skips": Skipping,
}


def make_pipeline(schedule: str = "1f1b", microbatches: int = 4) -> Accelerator:
    config = PipelineConfig(schedule=schedule, microbatches=microbatches)
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))


def compare(names: list[str], schedule: str) -> None:
    accelerator = make_pipeline(schedule)
    for name in names:
        torch.manual_seed(0)
        alone = RIGHT[name]()
        model = accelerator.prepare(copy.deepcopy(alone))
        inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
        expected = F.mse_loss(alone(inputs), targets)
        expected.backward()
        loss = accelerator.forward_backward(model, (inputs, targets), F.mse_loss)
        torch.testing.assert_close(loss, expected.detach(), msg=name)
        gradients = {
            key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for key, parameter in alone.named_parameters()
        }
        for key, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, gradients[key], msg=f"{name} {key}")
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(inputs), alone(inputs), msg=name)


@pytest.mark.parametrize(
    ("names", "schedule"),
    [(["checkpoint", "cache", "dataclass", "in place"], "1f1b"), (["detached", "skips"], "zbvzerobubble")],
)
def test_gradients_are_those_of_one_process(run: Run, names: list[str], schedule: str) -> None:
    run(compare, names, schedule, processes=2, timeout=60)


class WithScores(Layer):
    """Layer that also returns scores, which a loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 2)

    def forward(self, hidden: Any) -> Any:
        *scores, hidden = hidden
        hidden = super().forward(hidden)
        return (*scores, self.scores(hidden), hidden)


def train_without_scores(processes: int, sizes: dict[str, int], steps: int) -> dict[str, Tensor]:
    """Train with a loss that uses the scores of layers in the last step only."""
    config = PipelineConfig(microbatches=2)
    mesh = ParallelismConfig(pp_size=2, pp_handler=config, **sizes) if processes > 1 else None
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes and mesh else None
    accelerator = Accelerator(
        cpu=True, parallelism_config=mesh, fsdp_plugin=plugin, gradient_accumulation_steps=steps
    )
    torch.manual_seed(0)
    model = tower(WithScores, call, tuple)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(6):
        with accelerator.accumulate(model):
            torch.manual_seed(step)

            def loss_fn(outputs: Any, target: Tensor, step: int = step) -> Tensor:
                *scores, hidden = outputs
                used = sum(score.square().mean() for score in scores) if step > 3 else 0.0
                return F.mse_loss(hidden, target) + used

            accelerator.forward_backward(model, ((torch.randn(4, 4),), torch.randn(4, 4)), loss_fn)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize(
    ("processes", "sizes", "steps"),
    [
        (2, {}, 1),
        (2, {}, 2),
        pytest.param(4, {"dp_replicate_size": 2}, 2, marks=pytest.mark.slow),
        pytest.param(4, {"dp_shard_size": 2}, 2, marks=pytest.mark.slow),
    ],
)
def test_parameters_that_the_loss_does_not_use_are_not_decayed(
    run: Run, processes: int, sizes: dict[str, int], steps: int
) -> None:
    (expected,) = run(train_without_scores, 1, sizes, steps, processes=1)
    found = run(train_without_scores, processes, sizes, steps, processes=processes, timeout=120)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Selective(Layer):
    """Layer that stores the outputs of matrix products and recomputes everything else."""

    def forward(self, hidden: Tensor) -> Tensor:
        stored = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        result: Tensor = checkpoint(super().forward, hidden, use_reentrant=False, context_fn=stored)
        return result


def store_outputs_of_operators() -> str:
    accelerator = make_pipeline("zbvzerobubble")
    model = accelerator.prepare(tower(Selective, call, keep))
    batch = torch.randn(8, 4), torch.randn(8, 4)
    return error_of(lambda: accelerator.forward_backward(model, batch, F.mse_loss))


def test_split_backward_passes_refuse_stored_outputs_of_operators(run: Run) -> None:
    for text in run(store_outputs_of_operators, processes=2):
        assert text.startswith("The schedule zbvzerobubble runs two backward passes over a layer"), text


def last_attribute(part: Any, hidden: Tensor) -> Tensor:
    result: Tensor = part(hidden) + part.penalty
    return result


class Packing(Layer):
    """Layer whose recurrent part gets a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4, batch_first=True)

    def forward(self, hidden: Tensor, lengths: Any = None) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            hidden[:, None], lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return output[:, 0]


WRONG: dict[str, Callable[[], nn.Module]] = {
    "pack_padded_sequence": lambda: tower(Packing, call_with_lengths, keep),
    "use_reentrant=False": lambda: tower(Layer, call_in_reentrant_checkpoint, keep),
    "torch.view_as_real": lambda: tower(Complex, call, lambda hidden: hidden.abs()),
    "dataclasses only": lambda: tower(OfObjects, call, lambda hidden: hidden.value),
    "no attribute 'penalty'": lambda: tower(WithAttribute, last_attribute, keep),
}


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (PreparationError, StateError) as error:
        return str(error)
    return ""


def refuse_models() -> dict[str, str]:
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # of the reentrant checkpoint
    accelerator, batch = make_pipeline(), (torch.ones(8, 4), torch.ones(8, 4))
    found = {}
    for expected, make in WRONG.items():
        model = accelerator.prepare(make())
        found[expected] = error_of(lambda model=model: accelerator.forward_backward(model, batch, F.mse_loss))
    model = accelerator.prepare(tower(Layer, call, lambda hidden: hidden.t()))
    model.eval()
    found["first dimension"] = error_of(lambda: model(torch.eye(8, 4)))
    found["before `prepare`"] = error_of(lambda: copy.deepcopy(model))
    return found


def test_models_that_would_be_wrong_are_refused_on_all_ranks(run: Run) -> None:
    for found in run(refuse_models, processes=2, timeout=60):
        assert {expected: text for expected, text in found.items() if expected not in text} == {}


def refuse_losses() -> dict[str, str]:
    torch.manual_seed(0)
    accelerator = make_pipeline(microbatches=2)
    found = {}
    model = accelerator.prepare(tower(Layer, call, keep))
    inputs, targets = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(4).long()

    def penalized(output: Tensor, target: Tensor) -> Tensor:
        weights = [parameter.square().sum() for parameter in model.parameters()]
        return F.cross_entropy(output, target) + torch.stack(weights).sum()

    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("unknown")

    def train(loss_fn: Any, labels: Tensor = targets) -> Tensor:
        return accelerator.forward_backward(model, (inputs, labels), loss_fn)

    found["uses parameters"] = error_of(lambda: train(penalized))
    model = accelerator.prepare(tower(Layer, call, keep))
    with pytest.raises(KeyError, match="unknown"):
        train(failing)
    with pytest.raises(ConfigurationError, match="without gradient"):
        train(lambda output, target: F.cross_entropy(output.detach(), target))
    for _ in range(3, 8):  # up to a batch that is not compared with one rank
        assert train(F.cross_entropy).isfinite()
    is_last = accelerator.process_index == 1
    with pytest.raises(KeyError if is_last else PreparationError, match="unknown"):
        train(failing)
    model = accelerator.prepare(tower(Layer, call, keep))
    assert train(F.cross_entropy).isfinite()
    ignored = torch.tensor([0, -100, 0, 0])
    found["accumulate(model, num_items=...)"] = error_of(lambda: train(F.cross_entropy, ignored))
    model = accelerator.prepare(tower(Layer, call, lambda hidden: hidden * float("nan")))
    assert train(F.cross_entropy).isnan()
    return found


def test_losses_that_would_be_wrong_are_refused_on_all_ranks(run: Run) -> None:
    for found in run(refuse_losses, processes=2, timeout=60):
        assert {expected: text for expected, text in found.items() if expected not in text} == {}


def read_attribute(model: Any) -> Tensor:
    loss: Tensor = model.layers[0].penalty
    return loss


def read_first_attribute(model: Any) -> Tensor:
    return model.layers[0].first  # type: ignore[no-any-return]


def read_last_attribute(model: Any) -> Tensor:
    return model.layers[3].penalty  # type: ignore[no-any-return]


def read_weight(model: Any) -> Tensor:
    weight: Tensor = model.layers[0].linear.weight
    return weight.square().sum()


def read_detached_weight(model: Any) -> Tensor:
    return read_weight(model).detach()


def sum_weights(model: Any) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.layers.parameters()]).sum()


class Penalized(Layer):
    """Layer that sets an attribute, which it has before the first forward, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty: Any = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        self.penalty = hidden.detach().mean()
        self.first = hidden.detach().square().mean()
        return super().forward(hidden)


READERS = (
    read_attribute,
    read_first_attribute,
    read_last_attribute,
    read_weight,
    read_detached_weight,
    sum_weights,
)


def refuse_readers(verify: bool, microbatches: int) -> dict[str, str]:
    config = PipelineConfig(microbatches=microbatches, verify=verify)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    found = {}
    for reader in READERS:
        torch.manual_seed(0)
        model = accelerator.prepare(tower(Penalized, call, keep))
        batch = (torch.randn(8, 4), torch.randn(8, 4))

        def loss_of(output: Tensor, target: Tensor, reader: Any = reader, model: Any = model) -> Tensor:
            return F.mse_loss(output, target) + reader(model)

        found[reader.__name__] = error_of(
            lambda model=model, batch=batch, loss_of=loss_of: accelerator.forward_backward(
                model, batch, loss_of
            )
        )
    return found


def test_losses_that_read_layers_of_other_ranks_are_refused_on_all_ranks(run: Run) -> None:
    cases = [(True, 2), (True, 1), (False, 2)]  # verify and microbatches
    for compared, whole, uncompared in run(call_for_each, refuse_readers, cases, processes=2):
        accepted = [
            {name for name, text in found.items() if not text} for found in (compared, whole, uncompared)
        ]
        # Layers hand over other values than attributes, too.
        assert accepted == [set(), {"read_last_attribute"}, {"read_attribute"}]
        assert "layers.0 has no attribute 'first' on this rank" in uncompared["read_first_attribute"]


def scale_by_own_weight() -> None:
    torch.manual_seed(0)
    alone = tower(Layer, call, keep)
    accelerator = make_pipeline()
    model: Any = accelerator.prepare(copy.deepcopy(alone))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    losses = [
        partial(lambda last, output, target: F.mse_loss(output, target) * last.weight.detach().norm(), last)
        for last in (alone.layers[3].linear, model.layers[3].linear)  # type: ignore[index, union-attr]
    ]
    expected = losses[0](alone(inputs), targets)
    loss = accelerator.forward_backward(model, (inputs, targets), losses[1])
    torch.testing.assert_close(loss, expected.detach())


def test_losses_may_read_weights_of_the_last_stage(run: Run) -> None:
    run(scale_by_own_weight, processes=2)


def evaluate_in_two_dtypes() -> None:
    accelerator = make_pipeline()
    torch.manual_seed(0)
    alone = tower(Layer, call, keep)
    model = accelerator.prepare(copy.deepcopy(alone)).eval()
    inputs = torch.randn(8, 4)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs)
        torch.testing.assert_close(model(inputs), alone(inputs))


def test_a_forward_after_one_with_autocast_has_its_own_dtypes(run: Run) -> None:
    run(evaluate_in_two_dtypes, processes=2)
