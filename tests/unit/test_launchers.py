"""What the launchers decide before they start a process; starting is tested among the distributed tests."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.devices import hardware_table
from accelerate.launchers import debug_launcher, notebook, notebook_launcher
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play a machine with one kind of hardware and so many devices."""

    def play(backend: Any, count: int) -> None:
        monkeypatch.setattr(hardware_table, "detect", lambda: backend)
        monkeypatch.setattr(type(backend), "count", lambda self: count)

    return play


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note what the elastic agent would be given, and the environment it would be given it in."""
    calls: list[Any] = []

    def note(function: Any, args: Any, workers: Any, on_cpu: bool, *rendezvous: Any, **options: Any) -> None:
        calls.append((workers, rendezvous, options))

    monkeypatch.setattr(notebook, "run_elastic", note)
    return calls


def test_one_process_runs_in_the_calling_process(on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on(hardware_table.CPU, 1)
    seen = []
    notebook_launcher(
        lambda *args: seen.append((args, os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"])),
        (1, "a"),
        mixed_precision="bf16",
    )
    assert seen == [((1, "a"), os.getpid(), "bf16")]
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    assert "one CPU" in capsys.readouterr().out


def test_the_state_that_one_process_made_ends_with_it(on: Any) -> None:
    on(hardware_table.CPU, 1)
    seen = []

    def train(fails: bool) -> None:
        seen.append(Accelerator(cpu=True).num_processes)
        if fails:
            raise KeyError("column")

    notebook_launcher(train, (False,))
    with pytest.raises(KeyError):
        notebook_launcher(train, (True,))
    assert seen == [1, 1]
    assert not any((AcceleratorState._shared_state, GradientState._shared_state, PartialState._shared_state))
    notebook._check_notebook(hardware_table.CPU)


@pytest.mark.usefixtures("states")
def test_an_earlier_state_is_kept(on: Any) -> None:
    on(hardware_table.CPU, 1)
    state = PartialState(cpu=True)
    notebook_launcher(lambda: Accelerator(cpu=True))
    assert state.num_processes == 1
    assert not AcceleratorState._shared_state
    with pytest.raises(ConfigurationError, match="was already created"):
        notebook._check_notebook(hardware_table.CPU)


def test_the_environment_is_restored_after_an_error(on: Any) -> None:
    on(hardware_table.CPU, 1)

    def fail() -> None:
        raise KeyError("column")

    with pytest.raises(KeyError):
        notebook_launcher(fail)
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_all_gpus_are_used_by_default(on: Any, elastic: list[Any]) -> None:
    on(hardware_table.CUDA, 4)
    notebook_launcher(print, use_port=0, max_restarts=2, monitor_interval=0.5, rdzv_id="me")
    workers, _, options = elastic[0]
    assert (workers.size, workers.machines, workers.address) == (4, 1, "127.0.0.1")
    assert options == {
        "rdzv_endpoint": f"127.0.0.1:{workers.port}",
        "max_restarts": 2,
        "monitor_interval": 0.5,
        "run_id": "me",
        "log_line_prefix_template": None,
    }


def test_several_machines(on: Any, elastic: list[Any]) -> None:
    on(hardware_table.CUDA, 4)
    notebook_launcher(
        print,
        num_processes=2,
        num_nodes=3,
        node_rank=1,
        master_addr="10.0.0.1",
        use_port="1234",
        mixed_precision="fp16",
        rdzv_backend="c10d",
        rdzv_conf={"timeout": 9},
    )
    workers, rendezvous, options = elastic[0]
    assert rendezvous == ("c10d", {"timeout": 9})
    assert options["rdzv_endpoint"] == "10.0.0.1:1234"
    assert workers.environment() == {
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "NPROC": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "FORK_LAUNCHED": "1",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "MIXED_PRECISION": "fp16",
    }


def test_a_busy_port_is_replaced_on_one_machine_only() -> None:
    import socket

    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert notebook._free_port(port, 1) != port
        assert notebook._free_port(port, 2) == port


def test_xla_replicas_are_started_by_its_runtime(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    xmp = ModuleType("torch_xla.distributed.xla_multiprocessing")
    xmp.spawn = lambda launcher, **options: calls.append(  # type: ignore[attr-defined]
        (launcher.launcher, options, os.environ["ACCELERATE_MIXED_PRECISION"])
    )
    for name in ("torch_xla", "torch_xla.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, xmp.__name__, xmp)
    on(hardware_table.XLA, 8)
    monkeypatch.setattr(notebook, "count_chips", lambda: 8)
    for wanted, nprocs in ((None, None), (8, None), (1, 1)):
        calls.clear()
        notebook_launcher(print, ("a",), wanted, mixed_precision="bf16")
        assert calls == [(print, {"args": ("a",), "nprocs": nprocs, "start_method": "fork"}, "bf16")]
    with pytest.raises(ConfigurationError, match="num_processes=3: .* each of the 8 chips"):
        notebook_launcher(print, ("a",), 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mixed_precision": "fp32"}, "mixed_precision='fp32': no such precision"),
        ({"num_processes": 0}, "num_processes=0: at least one process is needed"),
        ({"num_processes": "2"}, "num_processes='2': it is not a whole number"),
        ({"num_processes": 3}, "num_processes=3: the limit of GPU .* is 2 here"),
        ({"node_rank": 2, "num_nodes": 2}, "node_rank=2: there are 2 machines"),
    ],
)
def test_wrong_arguments_are_named(on: Any, options: dict[str, Any], text: str) -> None:
    on(hardware_table.CUDA, 2)
    with pytest.raises(ConfigurationError, match=text):
        notebook_launcher(print, **options)


@pytest.mark.parametrize("launch", [notebook_launcher, debug_launcher])
def test_a_call_in_place_of_a_function_is_named(launch: Any) -> None:
    with pytest.raises(ConfigurationError, match="function=None: it cannot be called"):
        launch(None)


def test_debug_launcher_needs_a_process() -> None:
    with pytest.raises(ConfigurationError, match="num_processes=0"):
        debug_launcher(print, num_processes=0)


def test_one_process_on_an_apple_gpu(on: Any) -> None:
    on(hardware_table.MPS, 1)
    seen = []
    notebook_launcher(lambda: seen.append(os.environ["PYTORCH_ENABLE_MPS_FALLBACK"]))
    assert seen == ["1"]
    with pytest.raises(ConfigurationError, match="the limit of Apple GPU .* is 1 here"):
        notebook_launcher(print, num_processes=2)


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("launch", [notebook_launcher, debug_launcher])
def test_an_accelerator_in_the_notebook_is_refused(launch: Any) -> None:
    PartialState(cpu=True)
    with pytest.raises(ConfigurationError, match="Create it inside the function only"):
        launch(print, num_processes=2)


def test_cuda_in_the_notebook_is_refused(
    on: Any, elastic: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(hardware_table.CUDA, 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(notebook, "_on_cuda", lambda thing: thing is tensor)
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    tensor = torch.ones(1)
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "my_batch", {"x": [tensor]}, raising=False)
    with pytest.raises(ConfigurationError) as refused:
        notebook_launcher(print)
    assert "It is used by the variable 'my_batch'. Importing bitsandbytes may have" in str(refused.value)
    assert "restart the notebook" in str(refused.value)
    assert elastic == []


@pytest.mark.usefixtures("states")
def test_test_launch_builds_a_state() -> None:
    notebook.test_launch()
    assert PartialState().num_processes == 1


def test_gpus_without_p2p_disable_it_in_nccl(
    on: Any, elastic: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(hardware_table.CUDA, 2)
    monkeypatch.setattr(notebook, "check_cuda_p2p_ib_support", lambda: False)
    notebook_launcher(print)
    environment = elastic[0][0].environment()
    assert (environment["NCCL_P2P_DISABLE"], environment["NCCL_IB_DISABLE"]) == ("1", "1")


def test_the_default_port_is_a_free_one_on_one_node() -> None:
    assert notebook._free_port(29500, 1) != 29500
    assert notebook._free_port(29511, 1) == 29511
    assert notebook._free_port(29500, 2) == 29500


@pytest.mark.parametrize(
    "given", [{"use_port": "abc"}, {"use_port": 70000}, {"use_port": None}, {"num_nodes": "x"}]
)
def test_a_value_that_is_no_port_or_no_number_of_nodes_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        notebook_launcher(print, num_processes=2, **given)


@pytest.mark.parametrize("args", [5, "ab"])
@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_arguments_that_are_no_tuple_are_refused(launcher: Any, args: Any) -> None:
    with pytest.raises(ConfigurationError, match="^args=.*: it is not a tuple") as raised:
        launcher(print, args, num_processes=2)
    assert isinstance(raised.value, TypeError)
