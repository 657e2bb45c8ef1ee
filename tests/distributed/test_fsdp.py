"""Models that are hard to shard train as plain torch trains them, or are refused with what to do."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import AccelerateError, PreparationError, StateError
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import AORecipeKwargs, DistributedType, TorchDynamoPlugin, has_compiled_regions

Run = Callable[..., list[Any]]
WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.to(self.norm.weight.dtype))
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.enter = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.leave = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x.to(self.leave.weight.dtype)) * self.scale


class Adapter(nn.Module):
    """A linear layer that stays, and a small change of it that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


def plain() -> nn.Module:
    return Net()


def frozen() -> nn.Module:
    model = Net()
    model.enter.requires_grad_(False)
    for layer in model.layers:
        layer.norm.requires_grad_(False)
    return model


def tied() -> nn.Module:
    """Tied between two units: they cannot be units then."""
    model = Net()
    model.layers[1].linear.weight = model.layers[0].linear.weight
    return model


def mixed() -> nn.Module:
    model = Net()
    for layer in model.layers:
        layer.linear.to(torch.bfloat16)
    return model


def adapted() -> nn.Module:
    model = Net().requires_grad_(False)
    for layer in model.layers:
        layer.linear = Adapter(layer.linear)
    return model


def adapted_in_bfloat16() -> nn.Module:
    model = adapted()
    for layer in model.layers:
        layer.linear.base.to(torch.bfloat16)
    return model


MODELS = (plain, frozen, tied, mixed, adapted, adapted_in_bfloat16)


def batches(device: torch.device | str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        x = torch.randn(4, 3, generator=generator).to(device)
        yield x, x.sum(1, keepdim=True)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), y)


def make_optimizer(*models: nn.Module) -> torch.optim.Optimizer:
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.2, momentum=0.5)


def train_plain(*models: nn.Module) -> list[dict[str, torch.Tensor]]:
    optimizer = make_optimizer(*models)
    for x, y in batches():
        sum((loss_of(model, x, y) for model in models), torch.zeros(())).backward()
        torch.nn.utils.clip_grad_norm_([p for model in models for p in model.parameters()], 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return [model.state_dict() for model in models]


def train(accelerator: Accelerator, optimizer: Any, *models: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Train on the same batches on all ranks, so that their mean is that of one."""
    for x, y in batches(accelerator.device):
        accelerator.backward(
            sum((loss_of(model, x, y) for model in models), torch.zeros((), device=accelerator.device))
        )
        accelerator.clip_grad_norm_((p for model in models for p in model.parameters()), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return [accelerator.get_state_dict(model) for model in models]


def compare(
    build: Callable[[], nn.Module], ours: dict[str, torch.Tensor], torchs: dict[str, torch.Tensor]
) -> None:
    """Every trainable parameter has moved as plain torch moves it, and nothing else has."""
    start = build()
    coarse = any(p.dtype == torch.bfloat16 for p in start.parameters())
    assert sorted(ours) == sorted(torchs), set(torchs) ^ set(ours)
    for name, parameter in start.named_parameters():
        torch.testing.assert_close(
            ours[name], torchs[name], rtol=2e-2 if coarse else 1e-4, atol=2e-3 if coarse else 1e-5, msg=name
        )
        assert ours[name].dtype == parameter.dtype, name
        assert torch.equal(ours[name], parameter) is not parameter.requires_grad, name


def plugin_of(version: int, **fields: Any) -> FullyShardedDataParallelPlugin:
    warnings.filterwarnings("ignore", ".* has both parameters with requires_grad=True and False", UserWarning)
    units = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
    return FullyShardedDataParallelPlugin(fsdp_version=version, **{**units, **fields})


def train_each(version: int, fields: dict[str, Any]) -> dict[str, str]:
    """Return for each model what became of it: "trained", or why it was refused."""
    accelerator = Accelerator(fsdp_plugin=plugin_of(version, **fields))
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.is_fsdp2 is (version == 2)
    prepare = accelerator._prepare_fsdp2 if version == 2 else accelerator.prepare  # clients call either
    outcome = {}
    for build in MODELS:
        model = build()
        try:
            model, optimizer = prepare(model, make_optimizer(model))
        except PreparationError as error:
            outcome[build.__name__] = str(error)
            continue
        (state,) = train(accelerator, optimizer, model)
        if accelerator.is_main_process:
            compare(build, state, train_plain(build())[0])
        outcome[build.__name__] = "trained"
        accelerator.free_memory()
    return outcome


ALL_TRAINED = dict.fromkeys((build.__name__ for build in MODELS), "trained")


def test_the_matrix_of_fsdp_2(run: Run) -> None:
    assert run(train_each, 2, {}) == [ALL_TRAINED, ALL_TRAINED]


def test_the_matrix_of_fsdp_1(run: Run) -> None:
    for outcome in run(train_each, 1, {"use_orig_params": True}):
        assert "several dtypes (bfloat16, float32) in one unit" in outcome["mixed"]
        assert "Set fsdp_version=2" in outcome["mixed"]
        assert "several dtypes" in outcome["adapted_in_bfloat16"]
        assert {name for name, what in outcome.items() if what == "trained"} == {
            "plain",
            "frozen",
            "tied",
            "adapted",
        }


@pytest.mark.slow
def test_the_matrix_of_fsdp_1_with_flat_parameters(run: Run) -> None:
    for outcome in run(train_each, 1, {}):
        assert "frozen and trainable parameters in one unit" in outcome["frozen"]
        assert "Set use_orig_params=True" in outcome["adapted"]
        assert {name for name, what in outcome.items() if what == "trained"} == {"plain", "tied"}


def train_two(version: int) -> None:
    """One optimizer, and a norm, over two models; the optimizer is prepared after them."""
    accelerator = Accelerator(fsdp_plugin=plugin_of(version, use_orig_params=True))
    models = [plain(), frozen()]
    optimizer = make_optimizer(*models)
    prepared = [accelerator.prepare(model) for model in models]
    optimizer = accelerator.prepare(optimizer)
    states = train(accelerator, optimizer, *prepared)
    if accelerator.is_main_process:
        expected = train_plain(plain(), frozen())
        compare(plain, states[0], expected[0])
        compare(frozen, states[1], expected[1])


@pytest.mark.parametrize("version", [1, 2])
def test_two_models_train_with_an_optimizer_prepared_later(run: Run, version: int) -> None:
    run(train_two, version)


def names_of_sharded() -> list[str]:
    accelerator = Accelerator(fsdp_plugin=plugin_of(2))
    model = accelerator.prepare(Net())
    return [type(model).__name__, model._get_name(), accelerator.unwrap_model(model)._get_name()]


def test_a_sharded_model_has_the_name_of_its_class(run: Run) -> None:
    """The Trainer of transformers compares this name to decide whether it shifts labels."""
    assert run(names_of_sharded) == [["FSDPNet", "Net", "Net"]] * 2


def load_on_main(version: int, fields: dict[str, Any]) -> None:
    accelerator = Accelerator(
        fsdp_plugin=plugin_of(version, cpu_ram_efficient_loading=True, use_orig_params=True, **fields)
    )
    model = tied()
    if not accelerator.is_main_process:
        model = model.to("meta")
        model.layers[1].linear.weight = model.layers[0].linear.weight
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    (state,) = train(accelerator, optimizer, model)
    if accelerator.is_main_process:
        compare(tied, state, train_plain(tied())[0])


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (2, {}),
        (1, {}),
        pytest.param(2, {"cpu_offload": True}, marks=pytest.mark.slow),
        pytest.param(2, {"activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_weights_that_only_rank_0_has(run: Run, version: int, fields: dict[str, Any]) -> None:
    run(load_on_main, version, fields, env={"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})


def train_low(version: int, number_format: str) -> None:
    """Low precision: float32 outputs and master weights, and a loss that falls."""
    accelerator = Accelerator(
        mixed_precision=number_format, fsdp_plugin=plugin_of(version, use_orig_params=True)
    )
    model = mixed()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    before = accelerator.get_state_dict(model)
    x, y = next(batches(accelerator.device))
    losses = []
    for _ in range(12):
        output = model(x)
        assert output.dtype == torch.float32
        loss = nn.functional.mse_loss(output, y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
        assert torch.isfinite(norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.9
    assert all(p.dtype == torch.float32 for p in model.parameters())
    after = accelerator.get_state_dict(model)
    assert accelerator.is_main_process is bool(after)
    assert all(not torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize(
    ("version", "number_format"),
    [(2, "bf16"), (1, "bf16"), (2, "fp16"), pytest.param(1, "fp16", marks=pytest.mark.slow)],
)
def test_low_precision(run: Run, version: int, number_format: str) -> None:
    run(train_low, version, number_format)


def train_in_float8(folder: str) -> dict[str, Any]:
    """Weights are gathered in float8; master weights stay float32, in the state that is saved as well."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    recipe = AORecipeKwargs(enable_fsdp_float8_all_gather=True, pad_inner_dim=True)
    accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=plugin, kwargs_handlers=[recipe])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    x = torch.randn(16, 32).to(accelerator.device)
    losses = []
    for _ in range(12):
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(folder)
    saved = accelerator.get_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.0)
    accelerator.load_state(folder)
    back = accelerator.get_state_dict(model)
    locals_ = {type(p.to_local()).__name__ for p in model.parameters()}
    return {
        "losses": losses,
        "kinds": locals_,
        "same": all(torch.equal(saved[name], back[name]) for name in saved),
    }


@pytest.mark.slow
def test_weights_are_gathered_in_float8(run: Run, tmp_path: Path) -> None:
    for found in run(train_in_float8, str(tmp_path / "state"), timeout=180):
        assert found["losses"][-1] < found["losses"][0] * 0.5
        assert "WeightWithDynamicFloat8CastTensor" in found["kinds"]
        assert found["same"]


def skip_together(version: int) -> list[bool]:
    """A gradient that is not finite on one rank: all ranks leave the step out."""
    accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=plugin_of(version, use_orig_params=True))
    model = plain()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    x, y = next(batches(accelerator.device))
    accelerator.backward(loss_of(model, x, y))
    own = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()][0]
    part = own.to_local() if version == 2 else own
    if accelerator.process_index == 1:
        part.fill_(torch.inf)
    optimizer.step()
    return [accelerator.optimizer_step_was_skipped]


@pytest.mark.parametrize("version", [1, 2])
def test_all_ranks_skip_a_step_together(run: Run, version: int) -> None:
    assert run(skip_together, version) == [[True], [True]]


def look_at_the_edges(version: int) -> list[str]:
    """What is refused or warned about, and what a sharded model is for those who look at it."""
    accelerator = Accelerator(fsdp_plugin=plugin_of(version, use_orig_params=True, ignored_modules="enter"))
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    model = plain()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.unwrap_model(prepared) is model
    assert prepared.enter.weight.shape == (WIDTH, 3)  # ignored: whole
    assert accelerator.prepare(prepared) is prepared
    assert accelerator.state.fsdp_plugin.fsdp_version == version
    for call in (
        lambda: accelerator.join_uneven_inputs([prepared]).__enter__(),
        lambda: accelerator.prepare(*model_in_training()),
        lambda: accelerator.prepare(torch.optim.LBFGS(prepared.parameters())),
    ):
        try:
            call()
        except AccelerateError as error:
            found.append(str(error))
    whole = accelerator.prepare_model(plain(), evaluation_mode=True)
    assert type(whole) is Net
    assert [p.shape for p in whole.parameters()] == [p.shape for p in plain().parameters()]
    evaluated = prepared(next(batches(accelerator.device))[0])
    accelerator.backward(evaluated.sum())
    accelerator.clip_grad_value_(prepared.parameters(), 0.01)
    for parameter in prepared.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            assert local.numel() == 0 or local.abs().max() <= 0.01
    return found


def model_in_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain()
    optimizer = torch.optim.Adam(model.leave.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("version", [1, 2])
def test_unsupported_uses_give_warnings_and_errors(run: Run, version: int) -> None:
    for rank, found in enumerate(run(look_at_the_edges, version)):
        text = "\n".join(found)
        orphans = "to no prepared optimizer and will not change: enter.weight, enter.bias, leave.weight"
        assert (orphans in text) is (rank == 0)  # warnings come from the main process
        # FSDP 2 averages the gradients of ignored parameters.
        assert ("train and are in ignored_modules" in text) is (rank == 0 and version == 1)
        assert "join_uneven_inputs does not work with FSDP or tensor parallelism" in text
        assert "holds the state of 2 parameters, which cannot be sharded" in text
        assert "LBFGS joins all parameters into one vector" in text


def evaluate_apart(version: int, number_format: str, trained: bool) -> int:
    """Forwards in different numbers on different ranks, then training as if nothing had been."""
    accelerator = Accelerator(
        mixed_precision=number_format, fsdp_plugin=plugin_of(version, use_orig_params=True)
    )
    model = plain()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    x, _ = next(batches(accelerator.device))
    if trained:
        accelerator.backward(model(x).sum())
        optimizer.zero_grad()
    with accelerator.unsharded(model) if trained else accelerator.unsharded():
        expected = plain()(x)
        bare = accelerator.unwrap_model(model)
        for _ in range(1 + 2 * accelerator.process_index):
            torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
            bare(x)
        assert bare.layers[0].linear.weight.shape == (WIDTH, WIDTH)
        assert not model(x).requires_grad
        accelerator.wait_for_everyone()
    (state,) = train(accelerator, optimizer, model)
    if accelerator.is_main_process and number_format == "no":
        compare(plain, state, train_plain(plain())[0])
    return sum(p.numel() if version == 1 else p.to_local().numel() for p in model.parameters())


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("version", "number_format", "trained"),
    [
        (1, "no", False),
        (2, "no", True),
        pytest.param(1, "bf16", True, marks=pytest.mark.slow),
        pytest.param(2, "bf16", False, marks=pytest.mark.slow),
        pytest.param(2, "no", False, marks=pytest.mark.slow),
    ],
)
def test_evaluation_of_whole_models(run: Run, version: int, number_format: str, trained: bool) -> None:
    left = run(evaluate_apart, version, number_format, trained)
    whole = sum(p.numel() for p in plain().parameters())
    assert sum(left) == whole  # sharded again
    assert max(left) < whole


def train_compiled(version: int, by_region: bool) -> None:
    warnings.simplefilter("default")  # the compiler stops at warnings of its own
    accelerator = Accelerator(
        fsdp_plugin=plugin_of(version, use_orig_params=True),
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=by_region),
    )
    model = plain()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    assert has_compiled_regions(model)
    (state,) = train(accelerator, optimizer, model)
    assert type(accelerator.unwrap_model(model, keep_torch_compile=False)).__name__.endswith("Net")
    if accelerator.is_main_process:
        compare(plain, state, train_plain(plain())[0])


@pytest.mark.slow
@pytest.mark.parametrize("by_region", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_compiled_models(run: Run, version: int, by_region: bool) -> None:
    run(train_compiled, version, by_region, timeout=120)


class Residual(nn.Module):
    """Changes outputs of units in place, which are views for inputs with three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        output: torch.Tensor = self.layers[0](x)
        return output


def train_in_place(version: int) -> None:
    torch.manual_seed(0)
    alone, x = Residual(), torch.randn(2, 3, 4)
    accelerator = Accelerator(fsdp_plugin=plugin_of(version, transformer_cls_names_to_wrap=["Linear"]))
    model = accelerator.prepare(copy.deepcopy(alone))
    norms = []
    for each in (alone, model):
        y = each(x)
        y /= 2
        accelerator.backward(y.square().mean())
        norms.append(float(accelerator.clip_grad_norm_(each.parameters(), 1e9)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_outputs_of_units_may_change_in_place(run: Run, version: int) -> None:
    run(train_in_place, version)


def replace_the_public_function() -> list[str]:
    import accelerate.accelerator as public

    accelerator = Accelerator(fsdp_plugin=plugin_of(2))
    original, seen = public.fsdp2_prepare_model, []

    def replacement(given: Accelerator, model: nn.Module) -> nn.Module:
        seen.append(type(model).__name__)
        assert given is accelerator
        return original(given, model)

    public.fsdp2_prepare_model = replacement  # type: ignore[assignment]
    try:
        accelerator.prepare(plain())
    finally:
        public.fsdp2_prepare_model = original
    return seen


@pytest.mark.slow
def test_clients_may_replace_what_shards(run: Run) -> None:
    assert run(replace_the_public_function) == [["Net"], ["Net"]]


def trigger_in_backward(version: int) -> list[float]:
    """Backward without exchange, and then with it: gradients of both, averaged over ranks."""
    accelerator = Accelerator(fsdp_plugin=plugin_of(version, use_orig_params=True))
    model = accelerator.prepare(plain())
    expected = plain()
    inputs = [x + rank for rank in range(2) for x, _ in batches()][:4]
    for x in inputs:
        (expected(x).sum() / 2).backward()
    own = inputs[accelerator.process_index :: 2]
    with accelerator.no_sync(model):
        first = model(own[0]).sum()
        if version == 1:  # frees the units of all forwards in the first backward
            accelerator.backward(first)
        last = model(own[1]).sum()
        if version == 2:
            accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(last)
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    return [float(norm), float(torch.nn.utils.get_total_norm([p.grad for p in expected.parameters()]))]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_trigger_sync_in_backward_reduces_gradients(run: Run, version: int) -> None:
    for ours, expected in run(trigger_in_backward, version):
        assert ours == pytest.approx(expected, rel=1e-4)


class OwnList(torch.optim.SGD):
    """An optimizer that steps a list of its own, as LBFGS does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.own = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.own:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


def prepare_in_odd_orders(version: int) -> dict[str, list[bool]]:
    """Which parameters a step moves when the optimizer came first, or after a forward without gradients."""
    found = {}
    for order in ("optimizer first", "evaluated before", "own list"):
        AcceleratorState._reset_state()
        accelerator = Accelerator(fsdp_plugin=plugin_of(version, use_orig_params=True))
        model = plain()
        x, y = next(batches(accelerator.device))
        if order == "own list":
            model, optimizer = accelerator.prepare(model, OwnList(model.parameters()))
        elif order == "optimizer first":
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
            model = accelerator.prepare(model)
        else:
            model = accelerator.prepare(model)
            with torch.no_grad():
                model(x)
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
        before = whole_weights(model, accelerator)
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        after = whole_weights(model, accelerator)
        found[order] = [not torch.equal(before[name], after[name]) for name in before]
    return found


def whole_weights(model: nn.Module, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    with accelerator.unsharded(model):
        return {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}


@pytest.mark.parametrize("version", [1, 2])
def test_optimizers_prepared_before_the_model_or_after_an_evaluation_update_it(
    run: Run, version: int
) -> None:
    for found in run(prepare_in_odd_orders, version):
        for order, moved in found.items():
            assert moved, order
            assert all(moved), order


def keep_norms_exact(version: int) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=version == 1 or None)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model._keep_in_fp32_modules = ["1"]  # type: ignore[assignment]
    seen: dict[str, Any] = {}
    for name in ("0", "1"):
        inner = model.get_submodule(name)
        inner.register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: (module.weight.dtype, args[0].dtype)})
        )
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, 8)).square().sum()
    accelerator.backward(loss)
    optimizer.step()
    state = accelerator.get_state_dict(model)
    return {"seen": seen, "loss": loss.item(), "names": sorted(state)}


@pytest.mark.parametrize("version", [1, 2])
def test_norms_that_compute_in_float32(run: Run, version: int) -> None:
    for rank, found in enumerate(run(keep_norms_exact, version)):
        assert found["seen"]["0"][0] == torch.bfloat16
        assert found["seen"]["1"][0] == torch.float32
        assert found["loss"] > 0
        wanted = [f"{number}.{name}" for number in range(3) for name in ("bias", "weight")]
        assert found["names"] == (wanted if rank == 0 else [])


def ignore_what_is_not_there(version: int) -> list[str]:
    said = []
    for wrong in ("nothing", "*(", 3, [nn.Linear(2, 2)]):
        AcceleratorState._reset_state()
        accelerator = Accelerator(fsdp_plugin=plugin_of(version, ignored_modules=wrong))
        with pytest.raises(AccelerateError) as caught:
            accelerator.prepare(plain())
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("version", [1, 2])
def test_modules_to_ignore_are_modules_of_the_model(run: Run, version: int) -> None:
    for nothing, broken, number, foreign in run(ignore_what_is_not_there, version):
        assert "ignored_modules='nothing'" in nothing
        assert "not a regular expression" in broken
        assert "int" in number
        assert "Linear" in foreign


def weights_with_evaluations(reshards: bool, evaluates: str) -> list[float]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=reshards)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    inputs = torch.randn(4, 4)
    for _ in range(2):
        model.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        with torch.no_grad(), accelerator.unsharded(model) if evaluates == "unsharded" else nullcontext():
            if evaluates:
                model(inputs)
                model(inputs)
    weights = [float(value) for p in model.parameters() for value in p.full_tensor().flatten().detach()]
    AcceleratorState._reset_state(True)
    return weights


def weights_of_all_evaluations() -> list[tuple[bool, list[list[float]]]]:
    return [
        (reshards, [weights_with_evaluations(reshards, kind) for kind in ("", "sharded", "unsharded")])
        for reshards in (True, False)
    ]


def test_an_evaluation_changes_nothing_for_gradients_that_the_model_clears(run: Run) -> None:
    for found in run(weights_of_all_evaluations):
        for _, (without, sharded, unsharded) in found:
            assert without == sharded == unsharded


class Collecting(Layer):
    """Adds its output to a list or a dict of the caller."""

    def forward(self, x: torch.Tensor, outputs: Any = None) -> torch.Tensor:
        x = super().forward(x)
        if isinstance(outputs, list):
            outputs.append(x)
        else:
            outputs["total"] = outputs.get("total", 0.0) + x
        return x


class Collected(Net):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList([Collecting(), Collecting()]), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, outputs = self.enter(x), self.kind()
        for layer in self.layers:
            x = layer(x, outputs)
        return self.leave(x + sum(outputs if self.kind is list else outputs.values()))


def refuse_lost_changes() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Collecting"],
    )
    for kind in (list, dict):
        model = Accelerator(fsdp_plugin=plugin).prepare(Collected(kind))
        with pytest.raises(PreparationError, match=f"forward of Collecting changes a {kind.__name__}"):
            model(torch.ones(2, 3))
        AcceleratorState._reset_state(reset_partial_state=False)
    whole = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).prepare(Collected(list))
    whole(torch.ones(2, 3))


def test_lists_and_dicts_that_a_unit_changes_are_refused(run: Run) -> None:
    run(refuse_lost_changes)


def hook_gradients(version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        model = Net()
        getattr(next(model.parameters()), name)(lambda _: None)
        with pytest.raises(PreparationError, match="hooks on the gradients of parameters"):
            accelerator.prepare(model)
    if version == 1:
        return
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    with pytest.raises(StateError, match=r"register_hook\(\) was called on 1 parameter"):
        optimizer.step()


@pytest.mark.parametrize("version", [1, 2])
def test_hooks_that_sharded_parameters_do_not_call_are_refused(run: Run, version: int) -> None:
    run(hook_gradients, version)


def regularize() -> list[torch.Tensor]:
    """Returns gradients with a penalty on weights."""
    torch.manual_seed(0)
    is_sharded = PartialState(cpu=True).num_processes > 1
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if is_sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(Net())

    def loss_of(weights: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        return loss + sum(weight.square().sum() for weight in weights)

    weights: list[Any] = list(model.parameters())
    if is_sharded:
        with pytest.raises(StateError, match=r"Use parameter\.full_tensor\(\) in the penalty"):
            accelerator.backward(loss_of(weights))
        model.zero_grad()
    accelerator.backward(loss_of([w.full_tensor() if is_sharded else w for w in weights]))
    return [w.grad.full_tensor() if is_sharded else w.grad for w in weights]


def test_a_penalty_on_shards_is_refused_and_on_whole_weights_is_that_of_one_process(run: Run) -> None:
    (expected,) = run(regularize, processes=1)
    for found in run(regularize):
        torch.testing.assert_close(found, expected)


class Normalizing(nn.Module):
    """Its kernels read weights in the derivative of a gradient without a check of their storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.linear(self.norm(hidden)).tanh()
        return output


def penalize(version: int) -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))
    model = accelerator.prepare(Normalizing())
    inputs = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(StateError) as error:
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        accelerator.backward((gradient.norm() - 1).square())
    return str(error.value)


@pytest.mark.parametrize("version", [1, 2])
def test_a_gradient_penalty_is_refused(run: Run, version: int) -> None:
    assert all("one backward pass for a forward" in text for text in run(penalize, version))


# Gathered weights


class Odd(Net):
    """Parameters that torch does not shard, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))
        self.shift = nn.Parameter(torch.arange(12.0).view(6, 2).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor + self.empty.sum() + self.shift.mean()


def train_and_evaluate(version: int, is_odd: bool = False) -> tuple[list[float], dict[str, Any]]:
    """Evaluates in inference mode first, and without gradients between each backward and step."""
    accelerator = Accelerator(fsdp_plugin=plugin_of(version, use_orig_params=True))
    model: Any = Odd() if is_odd else plain()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for x, y in batches(accelerator.device):
        with torch.inference_mode():
            losses.append(loss_of(model, x, y).item())
        accelerator.backward(loss_of(model, x, y))
        with torch.no_grad():
            losses.append(loss_of(model, x, y).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, x, y).item())
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
    return losses, accelerator.get_state_dict(model)


@pytest.mark.parametrize(("version", "is_odd"), [(1, False), (2, False), (2, True)])
def test_evaluations_between_the_parts_of_a_step_have_no_effect(run: Run, version: int, is_odd: bool) -> None:
    ((expected, weights),) = run(train_and_evaluate, 2, is_odd, processes=1)
    found = run(train_and_evaluate, version, is_odd)
    for losses, _ in found:
        assert losses == pytest.approx(expected, abs=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=1e-5, check_device=False)


class Initialized(nn.Module):
    """A parameter that the first forward sets, as in a normalization of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.is_set = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.scale.data.copy_(torch.full((3,), 0.5))
            self.is_set = True
        return self.linear(x) * self.scale


def change_in_forward(version: int) -> tuple[str, str]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(Initialized())
    with pytest.raises(StateError) as error:
        model(torch.ones(2, 3))
    with pytest.raises(PreparationError) as refused:
        accelerator.prepare(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))
    return str(error.value), str(refused.value)


@pytest.mark.parametrize("version", [1, 2])
def test_a_forward_that_changes_weights_is_refused(run: Run, version: int) -> None:
    for changed, normalized in run(change_in_forward, version):
        assert changed.startswith("A forward changes scale. FSDP gathers weights")
        assert normalized.startswith("0 of Sequential has max_norm")


def clip_alone() -> None:
    accelerator = Accelerator(fsdp_plugin=plugin_of(1, use_orig_params=True))
    model: Any = plain()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = next(batches(accelerator.device))
    for clip in (accelerator.clip_grad_norm_, nn.utils.clip_grad_norm_):
        accelerator.backward(loss_of(model, x, y))
        clip(model.parameters(), 1e-3)
        if clip is nn.utils.clip_grad_norm_:
            with pytest.raises(StateError, match="scaled their gradients by different factors"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()


def test_norms_of_the_shards_of_each_rank_are_refused_with_fsdp1(run: Run) -> None:
    run(clip_alone)


def penalize_weights() -> str:
    accelerator = Accelerator(fsdp_plugin=plugin_of(1, use_orig_params=False))
    model: Any = accelerator.prepare(plain())
    penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    x, y = next(batches(accelerator.device))
    with pytest.raises(StateError) as error:
        accelerator.backward(loss_of(model, x, y) + penalty)
    return str(error.value)


def test_a_penalty_on_flat_shards_is_refused(run: Run) -> None:
    assert all("Set use_orig_params=True" in text for text in run(penalize_weights))


def step_parts() -> str:
    accelerator = Accelerator(fsdp_plugin=plugin_of(1, use_orig_params=False))
    model = plain()
    first, second = ([*model.parameters()][start::2] for start in (0, 1))
    with pytest.raises(PreparationError) as error:
        accelerator.prepare(model, torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1))
    return str(error.value)


def test_an_optimizer_of_a_part_of_a_flat_unit_is_refused(run: Run) -> None:
    for text in run(step_parts):
        assert text.startswith("SGD steps ")
        assert "which FSDP 1 joins into one parameter. Set use_orig_params=True" in text
