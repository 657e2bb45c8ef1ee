"""Attributes that other projects reach for, on the objects of one CPU process."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader

import accelerate.accelerator
import accelerate.hooks
import accelerate.utils.modeling
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AORecipeKwargs, check_tied_parameters_on_same_device

pytestmark = pytest.mark.usefixtures("states")

PARTIAL_KEYS = {
    *("_cpu", "backend", "device", "debug", "distributed_type", "num_processes"),
    *("process_index", "local_process_index", "fork_launched"),
}
ACCELERATOR_KEYS = PARTIAL_KEYS | {
    *(
        "deepspeed_plugins",
        "torch_tp_plugin",
        "parallelism_config",
        "device_mesh",
        "dynamo_plugin",
        "_mixed_precision",
    )
}
GRADIENT_KEYS = {"sync_gradients", "_dataloader_references_ref", "plugin_kwargs", "_is_xla_gradients_synced"}


def test_shared_dictionaries_are_empty_before_the_first_instance():
    for state in (PartialState, AcceleratorState, GradientState):
        assert state._shared_state == {}
        assert not state._shared_state


@pytest.mark.parametrize(
    ("state", "keys"),
    [(PartialState, PARTIAL_KEYS), (AcceleratorState, ACCELERATOR_KEYS), (GradientState, GRADIENT_KEYS)],
)
def test_shared_dictionaries_hold_the_attributes_of_every_instance(state, keys):
    Accelerator(cpu=True)
    assert keys <= set(state._shared_state)
    first, second = state(), state()
    assert first.__dict__ is second.__dict__ is state._shared_state


def test_shared_dictionaries_can_be_written_through_an_instance():
    accelerator = Accelerator(cpu=True)
    accelerator.state._shared_state["distributed_type"] = "MULTI_GPU"
    assert AcceleratorState().distributed_type == "MULTI_GPU"
    assert PartialState().distributed_type == "NO"
    assert accelerator.distributed_type in ["MULTI_GPU", "DEEPSPEED"]
    PartialState().distributed_type = "MULTI_GPU"
    assert PartialState().distributed_type == "MULTI_GPU"


def test_states_are_reset_one_by_one_and_together():
    Accelerator(cpu=True)
    AcceleratorState._reset_state()
    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state != {}
    Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
    assert GradientState._shared_state != {}
    GradientState._reset_state()
    assert GradientState._shared_state == {}


def test_plugins_that_are_not_in_use():
    state = Accelerator(cpu=True).state
    assert state.deepspeed_plugin is None
    assert getattr(state, "fsdp_plugin", None) is None
    assert not hasattr(state, "fsdp_plugin")
    assert getattr(state, "device_mesh", None) is None
    assert state.parallelism_config is None
    assert state.torch_tp_plugin is None
    assert isinstance(inspect.getattr_static(AcceleratorState, "is_fsdp2"), property)


def test_gradient_state_of_the_default_run():
    accelerator = Accelerator(cpu=True)
    state = accelerator.gradient_state
    assert state.plugin_kwargs == {"num_steps": 1}
    assert state.plugin_kwargs.get("sync_each_batch", False) is False
    state._set_sync_gradients(False)
    assert accelerator.sync_gradients is False
    assert state.end_of_dataloader is False
    assert state.remainder == -1


def test_step_counts_accumulate():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert accelerator.step == 0
    for _ in range(3):
        with accelerator.accumulate(model):
            pass
    assert accelerator.step == 3
    assert accelerator.step % accelerator.gradient_state.num_steps == 1


def test_prepared_objects_are_kept_in_lists_and_marked():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.ones(4, 1), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    assert prepared[0] is model
    lists = (accelerator._models, accelerator._optimizers, accelerator._dataloaders, accelerator._schedulers)
    assert lists == ([prepared[0]], [prepared[1]], [prepared[2]], [prepared[3]])
    assert all(getattr(obj, "_is_accelerate_prepared", False) for obj in prepared)
    assert isinstance(prepared[1], torch.optim.Optimizer)
    assert isinstance(prepared[2], DataLoader)
    accelerator.free_memory()
    assert [len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)] == [
        0,
        0,
        0,
    ]


def give_own_scaler(optimizer):
    """Do what clients do that keep one scaler for each optimizer; return the scaler and the steps it took."""
    scaler, inner_step, calls = torch.amp.GradScaler("cpu", init_scale=2.0), optimizer.optimizer.step, []

    def step(*args, **kwargs):
        calls.append(1)
        optimizer._accelerate_step_called = True
        return inner_step(*args, **kwargs)

    optimizer.scaler = scaler
    optimizer._accelerate_step_called = False
    optimizer._optimizer_original_step_method = inner_step
    optimizer._optimizer_patched_step_method = step
    return scaler, calls


@pytest.mark.parametrize("count", [1, 2])
def test_each_optimizer_can_have_a_scaler_of_its_own(count):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    models = [torch.nn.Linear(1, 1) for _ in range(count)]
    for model in models:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = [give_own_scaler(optimizer) for optimizer in accelerator._optimizers]
    for _ in range(2):
        for model, optimizer, (scaler, _) in zip(models, accelerator._optimizers, own, strict=True):
            before = model.weight.detach().clone()
            accelerator.scaler = scaler
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            assert not torch.equal(model.weight, before)
            assert accelerator.optimizer_step_was_skipped is False
    assert [len(calls) for _, calls in own] == [2] * count


def test_attributes_can_be_assigned_and_methods_replaced_on_the_instance():
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = True
    accelerator.even_batches = False
    accelerator.clip_grad_norm_ = lambda *args, **kwargs: "replaced"
    assert accelerator.native_amp is True
    assert accelerator.even_batches is False
    assert accelerator.clip_grad_norm_([], 1.0) == "replaced"
    assert not hasattr(Accelerator, "__slots__")


def test_settings_assigned_after_construction_count_at_the_next_prepare(monkeypatch):
    seen = []
    monkeypatch.setattr(
        accelerate.accelerator,
        "prepare_data_loader",
        lambda loader, *args, **kwargs: seen.append(kwargs) or loader,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.dispatch_batches = False
    accelerator.dataloader_config.data_seed = 7
    accelerator.prepare(DataLoader(torch.ones(4, 1)))
    assert (seen[0]["dispatch_batches"], seen[0]["data_seed"]) == (False, 7)


def test_signatures_have_the_parameters_that_clients_inspect():
    assert "use_gather_object" in inspect.signature(Accelerator(cpu=True).gather_for_metrics).parameters
    assert "model" in inspect.signature(Accelerator.no_sync).parameters


def test_fp8_attributes_are_those_of_the_precision_in_use():
    def read(accelerator):
        handlers = ("fp8", "ao", "te", "msamp")
        recipes = [getattr(accelerator, f"{name}_recipe_handler") for name in handlers]
        return [accelerator.fp8_enabled, accelerator.has_fp8_handler, *recipes]

    accelerator = Accelerator(cpu=True)
    assert read(accelerator) == [False, False, None, None, None, None]
    assert accelerator.delayed_fp8_autocast is False
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    recipe = accelerator.ao_recipe_handler
    assert read(accelerator) == [True, False, recipe, recipe, None, None]
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe = AORecipeKwargs()
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert read(accelerator) == [True, True, recipe, recipe, None, None]
    assert accelerator.fp8_recipe_handler is recipe


def test_module_attributes_are_the_objects_in_use(caplog):
    assert accelerate.accelerator.torch is torch
    unset = accelerate.accelerator._split_batches
    assert inspect.signature(Accelerator).parameters["split_batches"].default is unset
    assert Accelerator(cpu=True, split_batches=unset).split_batches is False
    assert {"to", "cuda"} <= set(accelerate.hooks._accelerate_added_attributes)


def test_clients_filter_warnings_of_device_maps(caplog):
    logger = accelerate.utils.modeling.logger
    for filters in ([], [lambda record: "no longer tied" not in record.getMessage()]):
        caplog.clear()
        logger.filters[:] = filters
        check_tied_parameters_on_same_device([["a", "b"]], {"a": 0, "b": 1})
        logger.filters.clear()
        assert len(caplog.records) == 1 - len(filters)


def test_the_backend_of_a_state_is_found_before_it_is_built():
    state = PartialState(cpu=True)
    assert state._prepare_backend(cpu=True) == (None, "NO")
    assert state._prepare_backend(True, False, "gloo") == ("gloo", "NO")


def test_models_and_optimizers_are_prepared_alone():
    accelerator = Accelerator(cpu=True)
    model, loader = torch.nn.Linear(1, 1), DataLoader(torch.ones(2, 1))
    optimizer = torch.optim.SGD(model.parameters())
    prepared = accelerator._prepare_fsdp2(loader, model, optimizer)
    assert prepared[:2] == (loader, model)
    assert isinstance(prepared[2], AcceleratedOptimizer)
    assert accelerator._prepare_fsdp2(model) == (model,)
    assert accelerator._prepare_fsdp2(loader) == (loader,)


def test_a_function_can_be_wrapped_or_decorated():
    accelerator = Accelerator(cpu=True)
    assert accelerator.on_main_process(lambda: 1)() == 1
    assert accelerator.is_main_process is accelerator.is_local_main_process is True
