"""A pipeline computes what the model on one rank does, or the first batch raises one error on all ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import PreparationError, is_torch_version
from accelerate.state import AcceleratorState
from accelerate.strategies.pipeline.verification import Verification
from accelerate.utils import PipelineConfig

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]
TOTALS = {"sum": torch.zeros(())}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + torch.tanh(self.linear(hidden))
        return result


class Net(nn.Module):
    """Calls four layers, one after the other."""

    layer: Callable[[], nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(type(self).layer() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


# Values that layers hand over outside of their outputs, one for each sample.


class Penalized(Layer):
    penalty: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.penalty = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        self.penalty = hidden.mean(1, keepdim=True)
        return super().forward(hidden)


class Attribute(Net):
    layer = Penalized

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden + sum(layer.penalty for layer in self.layers)


class Appending(Layer):
    def forward(self, hidden: Tensor, outputs: Any = None) -> Tensor:
        hidden = super().forward(hidden)
        outputs.append(hidden)
        return hidden


class ListArgument(Net):
    layer = Appending

    def forward(self, hidden: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for layer in self.layers:
            hidden = layer(hidden, outputs)
        return hidden + sum(outputs)


class Writing(Layer):
    def forward(self, hidden: Tensor, total: Any = None) -> Tensor:
        hidden = super().forward(hidden)
        total[:, :2].copy_(hidden[:, 2:])
        return hidden


class TensorArgument(Net):
    layer = Writing

    def forward(self, hidden: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for layer in self.layers[:2]:
            hidden = layer(hidden, total)
        for layer in self.layers[2:]:
            hidden = layer(hidden, torch.zeros_like(hidden))
        return hidden + total


class InPlace(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        outputs = hidden.new_zeros(4, *hidden.shape)
        for number, layer in enumerate(self.layers):
            outputs[number] = hidden = layer(hidden)
        return outputs.mean(0)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.features.append(output)

    def forward(self, hidden: Tensor) -> Tensor:
        self.features.clear()
        return super().forward(hidden) + sum(self.features)


class Buffered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = self.linear.bias.detach().sum()
        return super().forward(hidden)


class Buffer(Net):
    layer = Buffered

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * sum(layer.kept for layer in self.layers)


class Counting(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        TOTALS["sum"] = TOTALS["sum"] + hidden.sum(1, keepdim=True)
        return super().forward(hidden)


class Global(Net):
    layer = Counting

    def forward(self, hidden: Tensor) -> Tensor:
        TOTALS["sum"] = torch.zeros(())
        return super().forward(hidden) + TOTALS["sum"]


class Centered(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden - hidden.mean(0)


class Counted(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * len(hidden)


class OnlyInEvaluation(Hooked):
    def forward(self, hidden: Tensor) -> Tensor:
        return Net.forward(self, hidden) if self.training else super().forward(hidden)


CAUSES = {
    "Attribute": "layers.0 sets the attribute penalty",
    "ListArgument": "layers.0 changes its argument outputs",
    "TensorArgument": "layers.0 changes its argument total",
    "Buffer": "layers.0 sets the buffer kept",
}
WRONG = [Attribute, ListArgument, TensorArgument, InPlace, Hooked, Buffer, Global, Centered, Counted]


class RandomDepth(Net):
    """Draws in layers and between them, and counts batches in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.calls = nn.BatchNorm1d(4), nn.Dropout(0.5), 0
        self.lock = iter(())  # cannot be copied

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            hidden = self.drop(layer(hidden)) + 0.1 * torch.rand_like(hidden)
        return F.dropout(self.norm(hidden), 0.2, self.training)


def make_accelerator(layout: str = "", verify: bool = True, **options: Any) -> Accelerator:
    sizes: dict[str, Any] = {"": {}, "ddp": {"dp_replicate_size": 2}, "fsdp": {"dp_shard_size": 2}}[layout]
    config = PipelineConfig(microbatches=4, verify=verify)
    if layout == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    mesh = ParallelismConfig(pp_size=2, pp_handler=config, **sizes)
    return Accelerator(cpu=True, parallelism_config=mesh, **options)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except PreparationError as error:
        return str(error)
    return ""


def train_wrong_models() -> dict[str, str]:
    accelerator, batch = make_accelerator(), (torch.randn(8, 4), torch.randn(8, 4))
    found = {}
    for kind in WRONG:
        torch.manual_seed(0)
        model = accelerator.prepare(kind())
        found[kind.__name__] = error_of(
            lambda model=model: accelerator.forward_backward(model, batch, F.mse_loss)
        )
    model = accelerator.prepare(OnlyInEvaluation())
    accelerator.forward_backward(model, batch, F.mse_loss)
    model.eval()
    found["OnlyInEvaluation"] = error_of(lambda: model(batch[0]))
    return found


def test_models_whose_layers_depend_on_more_than_their_arguments_are_refused(run: Run) -> None:
    first, second = run(train_wrong_models)
    assert first.keys() == {*(kind.__name__ for kind in WRONG), "OnlyInEvaluation"}
    assert [
        name for name, text in first.items() if "microbatches=1" not in text and "split" not in text
    ] == []
    assert second.keys() == first.keys()
    assert all(second.values())
    assert {name: text for name, text in CAUSES.items() if text not in first[name]} == {}
    assert "On one rank" not in first["Hooked"]


def train_without_comparison() -> float:
    accelerator = make_accelerator(verify=False)
    torch.manual_seed(0)
    alone = Attribute()
    model = accelerator.prepare(copy.deepcopy(alone))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    loss = accelerator.forward_backward(model, (inputs, targets), F.mse_loss)
    return float(loss - F.mse_loss(alone(inputs), targets).detach())


def test_the_comparison_can_be_left_out(run: Run) -> None:
    assert all(abs(difference) > 0.01 for difference in run(train_without_comparison))


def compare_states(layout: str, precision: str) -> list[list[Tensor]]:
    """Returns weights and buffers after a step, with the comparison and without it."""
    states = []
    for verify in (True, False):
        accelerator = make_accelerator(layout, verify, mixed_precision=precision)
        torch.manual_seed(0)
        net = RandomDepth()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(accelerator.process_index % 2 if layout else 0)
        batch = (torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator))
        accelerator.forward_backward(model, batch, F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        states.append(
            [*accelerator.get_state_dict(model).values(), torch.get_rng_state(), torch.tensor(net.calls)]
        )
        accelerator.free_memory()
        AcceleratorState._reset_state()
    return states


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("", "no"),
        pytest.param("", "bf16", marks=pytest.mark.slow),
        pytest.param("ddp", "no", marks=pytest.mark.slow),
        ("fsdp", "no"),
    ],
)
def test_the_comparison_changes_no_state(run: Run, layout: str, precision: str) -> None:
    for compared, other in run(compare_states, layout, precision, processes=4 if layout else 2):
        for values, expected in zip(compared, other, strict=True):
            torch.testing.assert_close(values, expected, rtol=0, atol=0)


def classify() -> list[float]:
    """Returns the differences of losses and gradients where labels are missing in micro-batches."""
    from transformers import BertConfig, BertForSequenceClassification

    accelerator = make_accelerator()
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    alone = BertForSequenceClassification(BertConfig(vocab_size=10, num_labels=3, **sizes)).eval()
    model = accelerator.prepare(copy.deepcopy(alone))
    differences = []
    for labels in ([0, 1, 2, 0, 1, 2, 0, 1], [0, -100, 2, 0, -100, -100, 0, 1]):
        batch = {"input_ids": torch.randint(10, (8, 5)), "labels": torch.tensor(labels)}
        alone.zero_grad()
        model.zero_grad()
        expected = alone(**batch).loss
        expected.backward()
        loss = accelerator.forward_backward(model, batch)
        differences.append(abs(float(loss - expected.detach())))
        differences += [
            float((parameter.grad - alone.get_parameter(name).grad).abs().max())
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        ]
    return differences


def test_labels_that_a_classifier_ignores_do_not_count(run: Run) -> None:
    for differences in run(classify):
        assert max(differences) < 1e-5


class MaskedMean(Net):
    """Computes its loss as the mean over the entries of a mask."""

    def forward(self, hidden: Tensor, mask: Any = None) -> Any:
        errors = super().forward(hidden).square().mean(1)
        return {"loss": (errors * mask).sum() / mask.sum()}


def train_with_masks() -> list[str]:
    accelerator = make_accelerator()
    torch.manual_seed(0)
    texts = []
    full, short = torch.ones(8), torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 1])
    for masks in ([short], [full, full, short], [full, full, full, short]):
        model = accelerator.prepare(MaskedMean())
        for mask in masks[:-1]:
            accelerator.forward_backward(model, {"hidden": torch.randn(8, 4), "mask": mask})
        batch = {"hidden": torch.randn(8, 4), "mask": masks[-1]}
        texts.append(error_of(lambda model=model, batch=batch: accelerator.forward_backward(model, batch)))
    return texts


def test_a_loss_of_the_model_that_is_no_mean_over_samples_is_refused_whenever_it_is_checked(run: Run) -> None:
    for texts in run(train_with_masks):
        assert all("microbatches=1" in text for text in texts)


class Extended(nn.Linear):
    """Has a state besides its weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 1}


def refuse_models_at_prepare() -> list[str]:
    accelerator = make_accelerator()
    compiled, whole, forward = Net(), torch.compile(Net(), backend="eager"), Net()
    compiled.layers[1].compile(backend="eager")
    forward.layers[1].forward = torch.compile(forward.layers[1].forward, backend="eager")
    sharded = Net()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(sharded, mesh, {"layers.*.linear": ColwiseParallel(output_layouts=Replicate())})
    extended = nn.Sequential(Extended(), nn.Linear(2, 2))
    models = (compiled, forward, whole, sharded, extended)
    return [error_of(lambda model=model: accelerator.prepare(model)) for model in models]


def test_models_that_are_compiled_or_sharded_are_refused_at_prepare(run: Run) -> None:
    for compiled, forward, whole, sharded, extended in run(refuse_models_at_prepare):
        assert "layers.1 of Net are compiled" in compiled
        assert "layers.1 of Net are compiled" in forward
        assert "are compiled" in whole
        assert "sharded before `prepare`" in sharded
        assert "0 of Sequential have an extra state" in extended


class Warming(Attribute):
    """Uses values that layers hand over after some batches."""

    coefficient, start = 0.0, 99

    def __init__(self) -> None:
        super().__init__()
        self.coefficient, self.num_batches = type(self).coefficient, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_batches += self.training
        if self.coefficient or self.num_batches > self.start:
            return super().forward(hidden)
        return Net.forward(self, hidden)


class WarmingByItself(Warming):
    start = 60  # micro-batches


def train_with_changes() -> list[str]:
    """Returns the error of the batch in which a model has changed, and its number."""
    accelerator = make_accelerator()
    texts = []
    for kind in (Warming, WarmingByItself, Net):
        model = accelerator.prepare(kind())
        text = ""
        for number in range(1, 17 if kind is WarmingByItself else 4):
            if number == 3 and kind is Warming:
                model.coefficient = 0.5
            if number == 3 and kind is Net:
                features: list[Tensor] = []
                for layer in model.layers:
                    layer.register_forward_hook(lambda *args, kept=features: kept.append(args[2]))
                model.register_forward_hook(lambda *args, kept=features: args[2] + sum(kept))
            batch = (torch.randn(8, 4), torch.randn(8, 4))
            if text := error_of(
                lambda model=model, batch=batch: accelerator.forward_backward(model, batch, F.mse_loss)
            ):
                text = f"{number}: {text}"
                break
        texts.append(text)
    return texts


def test_a_model_that_the_user_changes_is_compared_again(run: Run) -> None:
    for changed, changed_itself, hooked in run(train_with_changes, processes=2):
        assert changed.startswith("3: ")
        assert changed_itself.startswith("16: ")
        assert hooked.startswith("3: ")


def count_comparisons() -> list[int]:
    """Returns the number of comparisons in three steps, each with two batches of an evaluation."""
    counts = [0, 0]

    def counting(index: int, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[index] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for index, name in enumerate(("check_training", "check_evaluation")):
            patch.setattr(Verification, name, counting(index, getattr(Verification, name)))
        accelerator, inputs = make_accelerator(), torch.randn(8, 4)  # the same on all ranks
        model = accelerator.prepare(RandomDepth())
        for _ in range(3):
            accelerator.forward_backward(model.train(), (inputs, torch.ones(8, 4)), F.mse_loss)
            model.eval()
            for _ in range(2):
                model(inputs)
    return counts


def test_a_model_that_does_not_change_is_compared_once(run: Run) -> None:
    assert run(count_comparisons, processes=2) == [[1, 1]] * 2


class Averaging(Net):
    """Keeps an average of its batches, and the size of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.register_buffer("average", torch.zeros(4))

    def forward(self, hidden: Tensor) -> Tensor:
        self.size = len(hidden)
        if self.training:
            self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return super().forward(hidden)


class Normalizing(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.norm(hidden))


class Normalized(Net):
    layer = Normalizing


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_with_statistics() -> list[list[str]]:
    found = []
    for kind, microbatches in ((Averaging, 4), (Normalized, 4), (Net, 4), (Averaging, 1), (Normalized, 1)):
        messages = Messages()
        logging.getLogger("accelerate").addHandler(messages)
        config = PipelineConfig(microbatches=microbatches)
        accelerator = Accelerator(
            cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config)
        )
        model = accelerator.prepare(kind())
        accelerator.forward_backward(model, (torch.randn(8, 4), torch.randn(8, 4)), F.mse_loss)
        logging.getLogger("accelerate").removeHandler(messages)
        found.append([text for text in messages.texts if "micro-batches" in text])
        accelerator.free_memory()
        AcceleratorState._reset_state()
    return found


def test_statistics_of_micro_batches_are_warned_of_once(run: Run) -> None:
    averaging, normalized, *others = run(train_with_statistics, processes=2)[0]
    assert ["average in Averaging" in text for text in averaging] == [True]
    assert ["layers.0.norm, layers.1.norm" in text for text in normalized] == [True]
    assert others == [[], [], []]


def train_on_own_batches() -> str:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    torch.manual_seed(0)
    model = accelerator.prepare(Net())
    torch.manual_seed(accelerator.process_index)
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    try:
        accelerator.forward_backward(model, batch, F.mse_loss)
    except PreparationError as error:
        return str(error)
    return ""


def test_batches_that_differ_between_the_ranks_of_a_pipeline_are_refused(run: Run) -> None:
    assert all("have different batches" in found for found in run(train_on_own_batches, processes=2))


def sum_of_others(outputs: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return (F.cross_entropy(outputs, labels, reduction="none") * (labels != ignored)).sum()


def mean_of_others(outputs: Tensor, labels: Tensor) -> Tensor:
    return sum_of_others(outputs, labels, 3) / (labels != 3).sum()


def masked_sum(outputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, mask = target
    return (F.cross_entropy(outputs, labels, reduction="none") * mask).sum()


def masked_mean(outputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return masked_sum(outputs, target) / target[1].sum()


LATE: dict[str, tuple[int, Any]] = {
    "default": (-100, F.cross_entropy),
    "padding": (0, partial(F.cross_entropy, ignore_index=0)),
    "ignored": (3, partial(F.cross_entropy, ignore_index=3)),
    "compared": (3, mean_of_others),
    "mask": (2, masked_mean),
    "mask of samples": (2, lambda outputs, target: masked_sum(outputs, target) / len(outputs)),
    "labels of samples": (3, lambda outputs, labels: sum_of_others(outputs, labels, 3) / len(outputs)),
}


def train_on_late_labels(kind: str) -> str:
    torch.manual_seed(0)
    ignored, loss_fn = LATE[kind]
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=4))
    )
    model = accelerator.prepare(Net())
    labels, mask = torch.arange(8) % 2 + 1, torch.ones(8)
    for number in range(3):
        if number == 2:  # a batch whose loss is not compared otherwise
            labels[5:], mask[5:] = ignored, 0
        target = (labels, mask) if "mask" in kind else labels
        try:
            accelerator.forward_backward(model, (torch.randn(8, 4), target), loss_fn)
        except PreparationError as error:
            return f"{number}: {error}"
    return ""


def test_labels_that_are_ignored_in_a_later_batch_are_refused(run: Run) -> None:
    for texts in run(call_for_each, train_on_late_labels, list(LATE), processes=2):
        found = dict(zip(LATE, texts, strict=True))
        refused = {kind for kind, text in found.items() if text.startswith("2: ") and "mean" in text}
        assert refused == {kind for kind in LATE if "of samples" not in kind}
        assert {kind for kind, text in found.items() if not text} == LATE.keys() - refused


def train_with_kept_features() -> str:
    accelerator = make_accelerator()
    features: list[Tensor] = []
    model = Net()
    model.layers[-1].register_forward_hook(lambda module, args, output: features.append(output))
    model = accelerator.prepare(model)

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs, target) + features.pop().mean()

    batch = (torch.randn(8, 4), torch.randn(8, 4))
    return error_of(lambda: accelerator.forward_backward(model, batch, loss_fn))


def test_a_loss_function_that_cannot_be_called_again_is_refused(run: Run) -> None:
    for message in run(train_with_kept_features, processes=2):
        assert "loss_fn raises IndexError" in message
