"""The installed torch has every private name that the package uses, and each does what is expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from accelerate import torch_private
from accelerate.base import ConfigurationError, is_torch_version
from accelerate.state import process_group

BUILDS_WITHOUT = {"dump_nccl_trace"}
"""Names that some builds of torch lack, such as those for the CPU."""
SINCE = dict.fromkeys(("attention_handlers", "ring_attention", "ring_attention_backward"), "2.13")
"""Names that older versions of torch lack: without them context parallelism on the CPU is refused."""
PRESENT = {
    name for name in {*torch_private.NAMES} - BUILDS_WITHOUT if is_torch_version(">=", SINCE.get(name, "2.9"))
}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    process_group.close_group()


def test_each_name_has_a_reason() -> None:
    assert all(row.reason.endswith(".") for row in torch_private.NAMES.values())


@pytest.mark.parametrize("name", sorted(PRESENT))
def test_torch_has_each_name(name: str) -> None:
    assert resolve_name(torch_private.NAMES[name].path) is not None
    assert getattr(torch_private, name) is resolve_name(torch_private.NAMES[name].path)


@pytest.mark.parametrize("name", [name for name, row in torch_private.NAMES.items() if row.fallback])
def test_a_missing_name_is_replaced_by_its_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(torch_private), name, raising=False)
    row = torch_private.NAMES[name]
    monkeypatch.setitem(torch_private.NAMES, name, row._replace(path="torch:is_not_there"))
    getattr(torch_private, name)
    assert name in vars(torch_private)
    del vars(torch_private)[name]


def test_a_missing_name_without_fallback_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(torch_private), "cpu_attention", raising=False)
    row = torch_private.NAMES["cpu_attention"]
    monkeypatch.setitem(torch_private.NAMES, "cpu_attention", row._replace(path="torch:is_not_there"))
    with pytest.raises(ConfigurationError, match=r"has no .*is_not_there.*CPU attention kernel"):
        _ = torch_private.cpu_attention


def test_fallbacks_flatten_as_torch_does() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.ones(2)]
    rows = [torch_private.NAMES[name] for name in ("flatten_dense_tensors", "unflatten_dense_tensors")]
    (flatten, unflatten), (flatten_here, unflatten_here) = (
        [resolve_name(row.path) for row in rows],
        [row.fallback() for row in rows if row.fallback],
    )
    assert torch.equal(flatten(tensors), flatten_here(tensors))
    assert all(
        map(torch.equal, unflatten(flatten(tensors), tensors), unflatten_here(flatten(tensors), tensors))
    )


@pytest.mark.usefixtures("group")
def test_fallbacks_do_what_their_callers_need() -> None:
    found = {name: row.fallback() for name, row in torch_private.NAMES.items() if row.fallback}
    store = found["default_store"]()
    store.set("key", "value")
    assert store.clone().get("key") == b"value"
    assert not found["may_exchange_data"](torch.ones(1), torch.ones(1))
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: found["autograd_engine"].queue_callback(lambda: None))
    weight.sum().backward()
    assert weight.grad == 1
    found["set_rotate_method"]("allgather")
    with pytest.raises(ConfigurationError, match=r"cp_comm_strategy='alltoall'.*no function"):
        found["set_rotate_method"]("alltoall")
    with torch_private.fake_tensors.FakeTensorMode(), found["no_dispatch"]():
        assert torch.ones(1).item() == 1


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="unknown_name"):
        _ = torch_private.unknown_name


# What torch keeps on its objects


def check_modules() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    assert torch_private.uncompiled(compiled) is model
    assert torch_private.uncompiled(model) is model
    assert not torch_private.is_compiled_in_place(model)
    model.compile()
    assert torch_private.is_compiled_in_place(model)
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("left_out", torch.ones(1), persistent=False)
    assert torch_private.non_persistent_buffers(model) == {"left_out"}
    wrapped = torch_private.checkpoint_wrapper.checkpoint_wrapper(model)
    assert torch_private.recomputed_module(wrapped) is model
    assert hasattr(wrapped, torch_private.WRAPPED[0])


def check_state_dict_hooks() -> None:
    model = nn.Linear(2, 2)
    assert torch_private.state_dict_hooks(model) == []
    model.register_load_state_dict_pre_hook(lambda *args: None)
    model.register_load_state_dict_post_hook(lambda *args: None)
    model.register_state_dict_post_hook(lambda *args: None)
    assert len(torch_private.state_dict_hooks(model)) == 3


def check_tensors() -> None:
    tensor = torch.ones(1, requires_grad=True)
    assert not torch_private.has_gradient_hooks(tensor)
    tensor.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.has_gradient_hooks(tensor)
    other = torch.ones(1, requires_grad=True)
    other.register_hook(lambda gradient: None)
    assert torch_private.has_gradient_hooks(other)
    optimizer = torch.optim.SGD([tensor], lr=0.1)
    assert not torch_private.has_load_hooks(optimizer)
    optimizer.register_load_state_dict_post_hook(lambda _: None)
    assert torch_private.has_load_hooks(optimizer)


def check_loaders() -> None:
    assert torch_private.requested_samples(RandomSampler(range(4), num_samples=3)) == 3
    assert torch_private.requested_samples(RandomSampler(range(4))) is None
    iterator = iter(DataLoader(list(range(4)), batch_size=2))
    assert type(iterator) is torch_private.SingleProcessIterator
    seen: list[list[int]] = []

    def note(indices: Any) -> Iterator[list[int]]:
        for index in indices:
            seen.append(index)
            yield index

    torch_private.wrap_indices(iterator, note)
    assert [batch.tolist() for batch in iterator] == seen == [[0, 1], [2, 3]]
    assert torch_private.loader_workers(iterator) == ()


def check_workers() -> None:
    iterator = iter(DataLoader(list(range(8)), batch_size=2, num_workers=1, prefetch_factor=2))
    assert [worker.is_alive() for worker in torch_private.loader_workers(iterator)] == [True]
    assert [task[0] for task in torch_private.loader_tasks(iterator)] == [0, 0]
    before = torch_private.loader_progress(iterator)
    next(iterator)
    assert torch_private.loader_progress(iterator) != before
    assert callable(getattr(type(iterator), torch_private.WAIT_FOR_BATCH))
    assert callable(getattr(torch.utils.data._utils.worker, torch_private.WORKER_LOOP))


def test_collectives_of_backends_that_do_not_count_them_are_unknown() -> None:
    class Group:
        def __init__(self, error: str) -> None:
            self.error = error

        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError(self.error)

    assert (
        torch_private.num_collectives(Group("ProcessGroup x does not yet support sequence numbers.")) is None
    )
    with pytest.raises(RuntimeError, match="closed"):
        torch_private.num_collectives(Group("the connection was closed"))


def check_groups() -> None:
    before = torch_private.num_collectives(dist.group.WORLD)
    dist.all_reduce(torch.ones(1))
    assert torch_private.num_collectives(dist.group.WORLD) == before + 1
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert torch_private.flatten_mesh(mesh["a", "b"], "both").mesh_dim_names == ("both",)


def check_ddp() -> None:
    replica = DistributedDataParallel(nn.Linear(2, 2))
    replica(torch.ones(1, 2)).sum().backward()
    assert not torch_private.comm_hooks(replica)
    replica.register_comm_hook(
        None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    )
    assert torch_private.comm_hooks(replica)
    assert torch_private.ddp_statistics(replica)["backend_name"] == "gloo"


def check_memory() -> None:
    assert torch_private.memory_recorder(torch.cuda.memory) is not None
    assert torch_private.memory_recorder(None) is None
    assert torch_private.memory_dump(torch.cuda.memory) is not None


CHECKS: list[Callable[[], None]] = [
    check_modules,
    check_state_dict_hooks,
    check_tensors,
    check_loaders,
    check_workers,
    check_groups,
    check_ddp,
    check_memory,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.usefixtures("group")
def test_objects_of_torch_have_what_is_read(check: Callable[[], None]) -> None:
    check()


def test_a_scheduler_follows_the_optimizer_that_steps() -> None:
    first = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    second = torch.optim.SGD(first.param_groups, lr=0.1)
    torch_private.set_scheduler_optimizer(scheduler, second)
    second.step()
    scheduler.step()  # warns if it takes the step for missing
    assert second.param_groups[0]["lr"] == 0.05
    torch_private.set_scheduler_optimizer(scheduler, second)
    assert scheduler.optimizer is second


def test_a_replaced_step_is_restored() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    original = optimizer.step
    with pytest.raises(KeyError), torch_private.step_replaced(optimizer, {}.popitem, original):
        optimizer.step()
    assert optimizer.step == original


def test_the_agent_starts_and_ends_its_processes_through_the_hooks() -> None:
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    original = multiprocessing.SubprocessContext
    assert {"_start", "_close"} <= set(dir(original))
    rendezvous = SimpleElasticAgent._rendezvous
    with torch_private.agent_hooks(lambda context, start: start(), lambda number: None, lambda size: size):
        assert inspect.signature(rendezvous).parameters.keys() == {"self", "worker_group"}
        assert SimpleElasticAgent._rendezvous is not rendezvous
        hooked = multiprocessing.SubprocessContext
        assert issubclass(hooked, original)
        assert (
            inspect.signature(hooked._close).parameters.keys()
            == inspect.signature(original._close).parameters.keys()
        )
    assert multiprocessing.SubprocessContext is original
    assert SimpleElasticAgent._rendezvous is rendezvous
