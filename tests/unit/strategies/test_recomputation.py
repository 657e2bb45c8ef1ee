"""Activation checkpointing of the blocks of a model on one process."""

from __future__ import annotations

import copy
import logging
import pickle
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from random import Random, SystemRandom
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import SelectiveCheckpointContext

from accelerate import Accelerator, torch_private
from accelerate.base import ConfigurationError, PreparationError
from accelerate.plugins import ActivationCheckpointing
from accelerate.state import AcceleratorState
from accelerate.strategies.recomputed_blocks import (
    RecomputedForward,
    SavingPolicy,
    find_blocks,
    keep_activations,
    overloads_of,
    recompute,
)

pytestmark = pytest.mark.usefixtures("states")
WIDTH, LENGTH, SAMPLES, LAYERS = 16, 12, 4, 6
SMALL = 100_000  # bytes for which all blocks are recomputed
aten = torch.ops.aten


class Layer(nn.Module):
    """Layer of a transformer with dropout, whose forward is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.counts = array("q", [0])  # that a recomputation does not restore

    @property
    def calls(self) -> int:
        return self.counts[0]

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.counts[0] += 1
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=0.2 if self.training else 0.0)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2))) * scale
        hidden: Tensor = x + self.drop(self.narrow(nn.functional.gelu(self.widen(x))))
        return hidden


class Net(nn.Module):
    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            for layer in self.layers:
                x = layer(x, scale=0.5)
        logits: Tensor = self.head(x)
        return logits


@pytest.fixture
def prepared(states: None) -> Callable[..., Any]:
    def prepare(model: nn.Module, handler: ActivationCheckpointing | None, **arguments: Any) -> Any:
        AcceleratorState._reset_state(True)
        handlers = [] if handler is None else [handler]
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **arguments)
        return accelerator, accelerator.prepare(model)

    return prepare


def built(repeats: int = 1) -> Net:
    torch.manual_seed(0)
    return Net(repeats)


def samples(count: int = SAMPLES) -> Tensor:
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(accelerator: Accelerator, model: nn.Module, batch: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    accelerator.backward(model(batch).square().mean())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


class Classified(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Mode in which a memory tracker counts recomputed tensors as activations."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch_private.find_recomputation(self.tracker)
        return func(*args, **(kwargs or {}))


def peak_of(step: Callable[[], Any], model: nn.Module, *inputs: Tensor) -> int:
    """Largest number of bytes of activations that exist at the same time during a real step."""
    tracker = torch_private.MemTracker()
    tracker.track_external(model, *inputs)
    torch_private.replace_module_hooks(tracker, model)
    peaks = [0]

    def record() -> None:
        sizes = torch_private.tracked_bytes(tracker).get(torch.device("cpu"), {})
        peaks.append(sizes.get("Activation", 0))

    torch_private.record_moments(tracker, record)
    with tracker, Classified(tracker):
        step()
    return max(peaks)


def activations_of(accelerator: Accelerator, model: nn.Module) -> int:
    batch = samples()
    return peak_of(lambda: gradients(accelerator, model, batch), model, batch)


POLICIES = {
    "one block": ActivationCheckpointing(LAYERS),
    "every third": ActivationCheckpointing(3),
    "every second": ActivationCheckpointing(2),
    "every": ActivationCheckpointing(),
    "by operator": ActivationCheckpointing(save_operators="matmul"),
    "some by operator": ActivationCheckpointing(2, save_operators=[aten.addmm.default]),
    "named": ActivationCheckpointing(2, blocks=["Layer"]),
}


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_without_recomputation(prepared: Any, name: str, repeats: int) -> None:
    expected = gradients(*prepared(built(repeats), None), samples())  # type: ignore[call-arg]
    model = built(repeats)
    names = [list(model.state_dict()), [name for name, _ in model.named_parameters()]]
    accelerator, result = prepared(model, POLICIES[name])
    assert result is model
    assert [list(model.state_dict()), [name for name, _ in model.named_parameters()]] == names
    found = gradients(accelerator, model, samples())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    again = POLICIES[name].every
    assert [layer.calls for layer in model.layers] == [
        repeats * (1 + (index % again == 0)) for index in range(LAYERS)
    ]


def test_each_policy_keeps_fewer_activations_than_the_one_before(prepared: Any) -> None:
    names = ["one block", "every third", "every second", "every"]
    policies = [None, *(POLICIES[name] for name in names)]
    sizes = [activations_of(*prepared(built(), policy)) for policy in policies]
    assert sizes == sorted(set(sizes), reverse=True)
    inputs = LAYERS * samples().nbytes  # the policy keeps those, and the activations of one layer
    assert inputs < sizes[-1] < inputs + 1.5 * sizes[0] / LAYERS
    by_operator = activations_of(*prepared(built(), POLICIES["by operator"]))
    assert sizes[-1] < by_operator < sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *POLICIES])
def test_a_plan_predicts_the_activations_of_each_policy(prepared: Any, name: str) -> None:
    policy = POLICIES.get(name)
    accelerator, model = prepared(built(), policy)
    optimizer = torch.optim.SGD(model.parameters())
    plan = accelerator.plan_memory(
        model, optimizer, samples(), lambda model, batch: model(batch).square().mean()
    )
    for _ in range(2):  # first calls are compared with their recomputation, which runs to the end
        gradients(accelerator, model, samples())
    moments = plan.planner.trace_of(plan.layout, SAMPLES).forward_backward
    planned = max(moment.activations for moment in moments)
    assert planned == pytest.approx(activations_of(accelerator, model), rel=0.02)
    assert plan.recomputed == ("nothing" if policy is None else policy.summary)
    assert ("recomputed in backward" in str(plan)) == (policy is not None)


@pytest.mark.parametrize(
    "share",
    [
        0.25,
        pytest.param(1.1, marks=pytest.mark.slow),
        pytest.param(0.99, marks=pytest.mark.slow),
        pytest.param(2 / 3, marks=pytest.mark.slow),
    ],
)
def test_the_activations_of_a_step_fit_in_the_budget(prepared: Any, caplog: Any, share: float) -> None:
    """The budget is that of the smallest policy, and a share of the difference to all activations."""
    whole = activations_of(*prepared(built(), None))
    smallest = activations_of(*prepared(built(), POLICIES["every"]))
    expected = gradients(*prepared(built(), None), samples())  # type: ignore[call-arg]
    budget = int(smallest + share * (whole - smallest))
    accelerator, model = prepared(built(), ActivationCheckpointing(budget=budget))
    with caplog.at_level(logging.WARNING):
        found = gradients(accelerator, model, samples())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert activations_of(accelerator, model) <= budget
    count = sum(layer.calls > 2 for layer in model.layers)
    gradients(accelerator, model, samples(SAMPLES - 1))
    assert (count == 0) == (share > 1)  # nothing is recomputed if all fits
    assert not caplog.records


def test_inputs_may_have_gradients(prepared: Any) -> None:
    accelerator, model = prepared(built().eval(), ActivationCheckpointing(budget=SMALL))
    scale = torch.ones((), requires_grad=True)
    model.train()(samples() * scale).square().mean().backward()
    assert [layer.calls for layer in model.layers] == [2] * LAYERS
    assert scale.grad is not None


@pytest.mark.slow
def test_a_budget_that_nothing_fits_names_the_smallest_need(prepared: Any) -> None:
    accelerator, model = prepared(built(), ActivationCheckpointing(budget="1KB"))
    with pytest.raises(
        ConfigurationError, match=r"budget='1KB': the activations of Net need at least"
    ) as error:
        gradients(accelerator, model, samples())
    needed = int(str(error.value).partition("Give ")[2].split()[0])
    accelerator, model = prepared(built(), ActivationCheckpointing(budget=needed))
    gradients(accelerator, model, samples())
    assert activations_of(accelerator, model) <= needed


def test_evaluation_chooses_nothing_and_a_larger_batch_warns_once(prepared: Any, caplog: Any) -> None:
    accelerator, model = prepared(built(), ActivationCheckpointing(budget="1GB"))
    with torch.no_grad():
        model(samples(9))
    model.eval()(samples(9))
    model.train()
    with caplog.at_level(logging.WARNING):
        gradients(accelerator, model, samples())
        assert not caplog.records
        gradients(accelerator, model, samples(SAMPLES + 1))
        gradients(accelerator, model, samples(SAMPLES + 2))
    assert len(caplog.records) == 1
    assert "budget=1GB. Train on the largest batch first" in caplog.text


def sum_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "recomputed"), [("1GB", "nothing"), (SMALL, "every block")])
def test_plan_memory_has_the_policy_of_a_budget(prepared: Any, budget: Any, recomputed: str) -> None:
    accelerator, model = prepared(built(), ActivationCheckpointing(budget=budget))
    optimizer = torch.optim.SGD(model.parameters())
    plan = accelerator.plan_memory(model, optimizer, samples(), sum_of)
    assert plan.recomputed == recomputed


@pytest.mark.slow
def test_plan_memory_of_a_budget_that_nothing_fits_raises_an_error(prepared: Any) -> None:
    accelerator, model = prepared(built(), ActivationCheckpointing(budget=10))
    with pytest.raises(ConfigurationError, match="need at least"):
        accelerator.plan_memory(model, torch.optim.SGD(model.parameters()), samples(), sum_of)


@pytest.mark.parametrize("name", ["every second", "by operator"])
def test_a_copy_recomputes_with_its_own_weights(prepared: Any, name: str) -> None:
    accelerator, model = prepared(built(), POLICIES[name])
    expected = gradients(accelerator, model, samples())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for parameter in model.parameters():
            parameter.data.zero_()
        calls = [layer.calls for layer in other.layers]
        torch.testing.assert_close(gradients(accelerator, other, samples()), expected, rtol=0, atol=0)
        assert other.layers[0].calls == calls[0] + 2
        assert isinstance(other.layers[0].__dict__["forward"], RecomputedForward)
        model.load_state_dict(other.state_dict())


@pytest.mark.slow
def test_a_copy_of_a_model_with_a_budget_chooses_nothing(prepared: Any) -> None:
    accelerator, model = prepared(built(), ActivationCheckpointing(budget=SMALL))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gradients(accelerator, other, samples())
        assert [layer.calls for layer in other.layers] == [1] * LAYERS
    gradients(accelerator, model, samples())
    assert [layer.calls for layer in model.layers] == [2] * LAYERS


def test_removal_restores_the_forward() -> None:
    model = built()
    recompute(model, model.layers)
    recompute(model, model.layers)
    assert keep_activations(model) is model
    assert not any("forward" in layer.__dict__ for layer in model.layers)
    first = model.layers[0]
    first.__dict__["forward"] = first.forward
    recompute(model, [first])
    keep_activations(model)
    assert first.__dict__["forward"] == Layer.forward.__get__(first)


def test_hooks_of_a_block_run_once(prepared: Any) -> None:
    accelerator, model = prepared(built(), ActivationCheckpointing())
    calls: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: calls.append("block"))
    model.layers[0].norm.register_forward_hook(lambda *_: calls.append("inside"))
    gradients(accelerator, model, samples())
    assert sorted(calls) == ["block", "inside", "inside"]


def test_models_prepared_for_evaluation_or_without_training_are_unchanged(prepared: Any) -> None:
    accelerator, _ = prepared(built(), ActivationCheckpointing())
    frozen = built().requires_grad_(False)
    evaluated = accelerator.prepare_model(built(), evaluation_mode=True)
    for model in (accelerator.prepare(frozen), evaluated):
        assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_a_second_run_has_its_own_policy(prepared: Any) -> None:
    _, model = prepared(built(), ActivationCheckpointing())
    accelerator, again = prepared(model, ActivationCheckpointing(LAYERS))
    gradients(accelerator, again, samples())
    assert [layer.calls for layer in model.layers] == [2] + [1] * (LAYERS - 1)


def test_named_blocks_are_the_outermost_ones() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    assert find_blocks(model[0], ["Sequential"]) == [model[0]]
    assert find_blocks(model, ["Linear"]) == [model[0][0], model[0][1][0], model[1]]
    with pytest.raises(
        ConfigurationError, match="blocks=.*Sequential has no module of these classes.*Linear"
    ):
        find_blocks(model, ["Layer"])


def test_a_model_without_blocks_warns(prepared: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prepared(nn.Linear(2, 2), ActivationCheckpointing())
    assert "ActivationCheckpointing has no effect on Linear: it has no lists of modules" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("policy", "regional"), [("by operator", True), ("every", False), ("every", True), ("by operator", False)]
)
def test_compiled_models_recompute(prepared: Any, policy: str, regional: bool) -> None:
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    reference = gradients(*prepared(built().eval(), None), samples())  # type: ignore[call-arg]
    logging.getLogger("torch").setLevel(logging.ERROR)  # torch warns about operators in place
    try:
        for handler in (POLICIES[policy], ActivationCheckpointing(budget=SMALL)):
            model = built().eval()
            accelerator, compiled = prepared(model, handler, dynamo_plugin=plugin)
            if handler.budget is not None:
                compiled.train()
                compiled(samples())
                compiled.eval()
                assert isinstance(model.layers[0].__dict__["forward"], RecomputedForward)
            found = gradients(accelerator, compiled, samples())
            torch.testing.assert_close(found, reference, rtol=0, atol=1e-6)
    finally:
        logging.getLogger("torch").setLevel(logging.NOTSET)


def tiny(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 32, "attn_implementation": "sdpa"}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, n_positions=32, **sizes)
        return transformers.GPT2LMHeadModel(config).train()
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, **sizes
    )
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_models_of_transformers_recompute(prepared: Any, kind: str, precision: str) -> None:
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(1))

    def train(handler: ActivationCheckpointing | None) -> list[Tensor | None]:
        accelerator, model = prepared(tiny(kind), handler, mixed_precision=precision)
        torch.manual_seed(3)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        return [parameter.grad for parameter in model.parameters()]

    expected = train(None)
    for handler in (POLICIES["every second"], POLICIES["by operator"], ActivationCheckpointing(budget="1MB")):
        torch.testing.assert_close(train(handler), expected, rtol=0, atol=1e-6)


def test_a_model_that_recomputes_itself_raises_an_error(prepared: Any) -> None:
    model: Any = tiny("llama")
    for layer in model.model.layers:
        layer.gradient_checkpointing = True  # as gradient_checkpointing_enable() does
    with pytest.raises(ConfigurationError, match="gradient_checkpointing_enable"):
        prepared(model, ActivationCheckpointing())


def test_a_budget_needs_a_model_that_can_be_copied(prepared: Any) -> None:
    model = built()
    model.lines = (line for line in "")  # type: ignore[assignment]
    with pytest.raises(PreparationError, match="cannot be copied, which a plan needs"):
        prepared(model, ActivationCheckpointing(budget="1GB"))


def test_kept_operators_are_not_run_again() -> None:
    layer = built().layers[0].eval()
    counts: Counter[str] = Counter()

    class Count(torch_private.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    def count(operators: Any) -> Counter[str]:
        """Number of operators in a forward and backward pass, by name."""
        recompute(keep_activations(layer), [layer], save_operators=operators, compares_outputs=False)
        counts.clear()
        with Count():
            layer(samples()).sum().backward()
        return counts.copy()

    attention = "_scaled_dot_product_flash_attention_for_cpu"
    again, kept, some = count(None), count("matmul"), count([aten.gelu.default])
    assert {name: again[name] - kept[name] for name in ("addmm", attention, "gelu")} == {
        "addmm": 4 - 1,  # torch does not run the last one again
        attention: 1,
        "gelu": 0,
    }
    assert again["gelu"] - some["gelu"] == 1


def test_a_layer_that_runs_several_times_casts_its_weights_in_each_recomputation(prepared: Any) -> None:
    policy = ActivationCheckpointing(save_operators="matmul")
    expected = gradients(*prepared(built(2), None, mixed_precision="bf16"), samples())  # type: ignore[call-arg]
    found = gradients(*prepared(built(2), policy, mixed_precision="bf16"), samples())  # type: ignore[call-arg]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-5)


class AttentionAndDropout(nn.Module):
    """An operator with dropout of its own, as the attention of accelerators, and a dropout after it."""

    def __init__(self, operator: Any, probability: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.operator, self.probability = operator, probability

    def forward(self, x: Tensor) -> Tensor:
        noise = self.operator(self.weight.detach(), self.probability)
        return nn.functional.dropout(x * self.weight + noise, 0.5).exp()


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_dropout_after_kept_attention_is_that_of_the_forward(probability: float) -> None:
    calls: list[float] = []

    def attend(x: Tensor, dropout_p: float) -> Tensor:
        calls.append(dropout_p)
        return torch.bernoulli(torch.full_like(x, 0.5)) if dropout_p else torch.zeros_like(x)

    with torch.library._scoped_library("recomputation_tests", "DEF") as library:
        library.define(
            "attend(Tensor x, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
        )
        library.impl("attend", attend, "CPU")
        operator = torch.ops.recomputation_tests.attend.default
        found = []
        for keeps in (False, True):
            module = AttentionAndDropout(operator, probability)
            if keeps:
                recompute(module, [module], save_operators=[operator])
            torch.manual_seed(5)
            calls.clear()
            module(torch.ones(64)).sum().backward()
            found.append(module.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert len(calls) == (2 if probability else 1)  # without dropout the output is kept


def test_attention_that_draws_numbers_is_run_again() -> None:
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    tensors = [torch.zeros(1, 1, 2, 2)] * 3
    policy = partial(SavingPolicy(overloads_of("matmul")), SelectiveCheckpointContext(is_recompute=False))
    assert policy(operator, *tensors).name == "MUST_SAVE"
    assert policy(operator, *tensors, 0.5).name == "PREFER_RECOMPUTE"
    assert policy(operator, *tensors, dropout_p=0.5).name == "PREFER_RECOMPUTE"
    assert policy(aten.gelu.default, tensors[0]).name == "PREFER_RECOMPUTE"


class Stateful(nn.Module):
    """Block whose result depends on a buffer, a counter and a list, and which has batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("last", torch.zeros(()))
        self.calls, self.seen = 0, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(0.5 * self.calls)
        self.scale.mul_(1.5)
        self.last = x.detach().mean()
        hidden: Tensor = (
            self.norm(torch.tanh(self.linear(x))) * self.scale.clone() / (self.calls + self.seen[-1])
        )
        return hidden + self.last


class OfStateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stateful() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("options", [{"every": 1}, {"save_operators": "matmul"}], ids=str)
def test_state_that_a_forward_changes_is_that_without_recomputation(
    prepared: Any, options: dict[str, Any], accumulates: bool
) -> None:
    results = []
    for handler in (None, ActivationCheckpointing(**options)):
        torch.manual_seed(0)
        accelerator, model = prepared(OfStateful(), handler)
        for _ in range(2):
            losses = [model(samples() + part).square().mean() for part in range(1 + accumulates)]
            accelerator.backward(torch.stack(losses).sum())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        plain = [(layer.calls, list(layer.seen)) for layer in model.layers]
        results.append(([parameter.grad for parameter in model.parameters()], state, plain))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


class Mixed(nn.Module):
    """Block that counts its calls in objects of several types, and draws from several generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.counts, self.by_name, self.order = Counter[str](), defaultdict[str, int](int), deque[int]()
        self.numbers, self.tensor, self.array = set[int](), torch.zeros(1), np.zeros(1)
        self.random, self.generator, self.system = Random(0), np.random.default_rng(0), SystemRandom()

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        self.by_name["calls"] += 1
        self.order.append(len(self.order))
        self.numbers.add(len(self.numbers))
        self.tensor += 1
        self.array += 1
        scale = self.random.random() + self.generator.random() + len(self.order) + self.tensor
        return torch.tanh(self.linear(x)) * scale

    @property
    def lengths(self) -> list[float]:
        counts = [self.counts["calls"], self.by_name["calls"], len(self.order), len(self.numbers)]
        return [*counts, self.tensor.item(), self.array.item()]


def test_objects_and_generators_of_any_type_change_once(prepared: Any) -> None:
    gradients = []
    for handler in (None, ActivationCheckpointing(every=1)):
        torch.manual_seed(0)
        net = OfStateful()
        net.layers = nn.ModuleList([Mixed(), Mixed()])
        accelerator, model = prepared(net, handler)
        for _ in range(3):
            accelerator.backward(model(samples()).square().mean())
        assert all(block.lengths == [3] * 6 for block in model.layers)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of dynamo
def test_a_compiled_model_changes_its_buffers_once(prepared: Any) -> None:
    found = []
    for handler, backend in ((None, None), (ActivationCheckpointing(every=1), "aot_eager")):
        torch.manual_seed(0)
        accelerator, model = prepared(OfStateful(), handler, dynamo_backend=backend)
        accelerator.backward(model(samples()).square().mean())
        net = accelerator.unwrap_model(model, keep_torch_compile=False)
        found.append((net.state_dict(), [parameter.grad for parameter in net.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_large_buffer_that_changes_in_place_is_refused(prepared: Any) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("memory", torch.zeros(2**17))

        def forward(self, x: Tensor) -> Tensor:
            self.memory += 1
            return self.linear(x) * self.memory[0]

    accelerator, model = prepared(nn.Sequential(Large(), Large()), ActivationCheckpointing(every=1))
    with pytest.raises(ConfigurationError, match="its forward changes its buffer 'memory' in place"):
        model(samples())


class ChangesProduct(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), change

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight
        self.change(hidden)
        return torch.tanh(hidden)


@pytest.mark.parametrize(
    "change", [lambda h: h.add_(1.0), lambda h: h.sigmoid_(), lambda h: h[:, 1:].mul_(2.0)], ids=range(3)
)
@pytest.mark.parametrize("dimensions", [2, 3])
def test_products_that_are_changed_in_place_are_not_kept(prepared: Any, change: Any, dimensions: int) -> None:
    model = nn.Sequential(*(ChangesProduct(change) for _ in range(2)))
    accelerator, model = prepared(model, ActivationCheckpointing(every=1, save_operators="matmul"))
    with pytest.raises(ConfigurationError, match="changes an output of it in place"):
        model(samples() if dimensions == 3 else samples()[0])


def test_other_tensors_may_be_changed_in_place(prepared: Any) -> None:
    found = []
    for handler in (None, ActivationCheckpointing(every=1, save_operators="matmul")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ChangesProduct(lambda h: (h + 1).add_(1.0)))
        accelerator, model = prepared(model, handler)
        found.append(gradients(accelerator, model, samples()))
    torch.testing.assert_close(*found)


class Adding(nn.Module):
    """Adds to a tensor that it gets as a keyword argument, of which torch knows no version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, *, total: Tensor) -> Tensor:
        total += hidden
        return self.linear(hidden) * total


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    layer = nn.ModuleList([Adding()])
    recompute(layer, list(layer))
    hidden = torch.ones(2, 4)
    for total in (torch.zeros(2, 4), torch.zeros(2, 4).requires_grad_().clone()):
        with pytest.raises(ConfigurationError, match="an input of its forward has been changed in place"):
            layer[0](hidden, total=total)
    with torch.no_grad():
        layer[0](hidden, total=torch.zeros(2, 4))


class Scaling(nn.Linear):
    def forward(self, hidden: Tensor, *, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) * scale


def test_an_input_that_is_changed_in_place_after_the_forward_is_refused() -> None:
    layer, scale = nn.ModuleList([Scaling(4, 4)]), torch.ones(4)
    recompute(layer, list(layer))
    loss = layer[0](torch.ones(2, 4), scale=scale).sum()
    scale += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # of torch
        loss.backward()


def test_parameters_of_one_call_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    recompute(model, list(model))
    weights = {name: 2 * parameter for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigurationError, match="its parameters are replaced during this call"):
        torch.func.functional_call(model, weights, (torch.ones(2, 4),))


class Summing(nn.Module):
    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.linear, self.adds = nn.Linear(WIDTH, WIDTH), adds

    def forward(self, earlier: list[Tensor], *, found: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.linear(torch.stack(earlier).sum(0)).tanh()
        found["penalty"] = found.get("penalty", 0.0) + out.abs().mean()
        if self.adds:
            earlier.append(out)
        return out


class Dense(nn.Module):
    """Model whose blocks get a list of all outputs, to which the model or the block adds another one."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Summing(adds=not adds) for _ in range(LAYERS))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        outputs, found = [x], dict[str, Tensor]()
        for layer in self.layers:
            out = layer(outputs, found=found)
            if self.adds:
                outputs.append(out)
        assert len(outputs) == 1 + LAYERS
        return outputs[-1].square().sum() + found["penalty"]


@pytest.mark.parametrize("adds", [False, True])
def test_lists_and_dicts_of_inputs_may_grow(adds: bool) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model, batch = Dense(adds=adds), torch.randn(LENGTH, WIDTH)
        if recomputes:
            recompute(model, model.layers)
        loss = model(batch)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)


GENERATOR = torch.Generator()


def late_noise(generator: torch.Generator | None) -> nn.Module:
    """Returns a layer that draws in later forward passes only, from a variable of its file or function."""

    class LateNoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.is_noisy = nn.Linear(WIDTH, WIDTH), False

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=generator or GENERATOR) if self.is_noisy else 1.0
            return torch.tanh(self.linear(x * noise))  # type: ignore[no-any-return]

    return LateNoise()


@pytest.mark.parametrize("of_function", [True, False])
def test_a_recomputation_repeats_the_draws_that_a_later_forward_begins(of_function: bool) -> None:
    generator = torch.Generator() if of_function else None
    plain = nn.Sequential(*(late_noise(generator) for _ in range(2)))
    found = copy.deepcopy(plain)
    recompute(found, list(found))
    inputs = torch.randn(SAMPLES, WIDTH)
    for model in (plain, found):
        (generator or GENERATOR).manual_seed(0)
        for number in range(3):
            for layer in model:
                layer.is_noisy = number > 0
            model(inputs).square().sum().backward()
    for expected, parameter in zip(plain.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=0)


class Noisy(nn.Module):
    """Layer that adds noise from a generator of its own, or from that of the module of Python."""

    generator_of_all = torch.Generator()

    def __init__(self, *, has_own: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if has_own:
            self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        generator = vars(self).get("generator", self.generator_of_all)
        noise = torch.randn(x.shape, generator=generator)
        return torch.tanh(self.linear(x * noise))  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_own", [True, False])
def test_a_recomputation_repeats_the_draws_of_generators(has_own: bool) -> None:
    plain = nn.Sequential(*(Noisy(has_own=has_own) for _ in range(2)))
    found = copy.deepcopy(plain)
    recompute(found, list(found))
    inputs, states = torch.randn(SAMPLES, WIDTH), []
    for model in (plain, found):
        Noisy.generator_of_all.manual_seed(0)
        for _ in range(3):
            model(inputs).square().sum().backward()
        states.append([Noisy.generator_of_all, *(vars(layer).get("generator") for layer in model)])
        states[-1] = [None if each is None else each.get_state().tolist() for each in states[-1]]
    assert states[0] == states[1]
    for expected, parameter in zip(plain.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=0)


class Counts:
    def __init__(self) -> None:
        self.calls, self.norms = 0, list[float]()


class Counting(nn.Module):
    """Layer that changes an object of the program, on which its result depends."""

    def __init__(self, own: Counts | None) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(WIDTH, WIDTH), own

    def forward(self, x: Tensor, counts: Counts) -> Tensor:
        counts = self.own or counts
        counts.calls += 1
        out: Tensor = self.linear(x).tanh() * (counts.calls + len(counts.norms))
        counts.norms.append(out.detach().norm().item())
        return out


@pytest.mark.parametrize("has_own", [True, False])
def test_a_recomputation_repeats_changes_of_objects(has_own: bool) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        counts = Counts()
        layers = [Counting(counts if has_own else None) for _ in range(2)]
        model, x = nn.ModuleList(layers), torch.randn(SAMPLES, WIDTH)
        if recomputes:
            recompute(model, layers)
        for _ in range(2):
            h = x
            for layer in layers:
                h = layer(h, counts)
            h.square().sum().backward()
        found.append([vars(counts), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)
