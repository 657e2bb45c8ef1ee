"""Installing torch_xla in Google Colab."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packaging.version import Version

from accelerate.base import StateError
from accelerate.devices import XLA, RowSharding, count_chips, install_xla, xla


@pytest.mark.parametrize(
    ("files", "count"), [([], 0), (["accel0", "accel1"], 2), (["vfio/0", "vfio/1", "vfio/vfio"], 2)]
)
def test_chips_are_device_files(files, count, tmp_path):
    (tmp_path / "vfio").mkdir()
    for name in files:
        (tmp_path / name).touch()
    assert count_chips(tmp_path) == count


def test_install_xla_is_refused_outside_of_colab(monkeypatch):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    with pytest.raises(StateError, match="Google Colab"):
        install_xla()


@pytest.mark.parametrize("upgrade", [True, False])
def test_colab_installs_the_release_of_torch(upgrade, monkeypatch):
    commands = []
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append((command, check)))
    install_xla(upgrade=upgrade)
    ((command, check),) = commands
    assert check
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert f"torch_xla[tpu]=={Version(torch.__version__).public}" in command
    assert ("--upgrade" in command) is upgrade


@pytest.mark.parametrize("state", [0, 5, 2**63 - 1, 2**63, 2**64 - 1])
def test_states_of_its_generator_are_unsigned(state, monkeypatch):
    written = []
    module = SimpleNamespace(get_rng_state=lambda: state, set_rng_state=written.append)
    monkeypatch.setattr(type(XLA), "torch_module", lambda self: module)
    kept = XLA.rng_state()
    assert kept.dtype == torch.int64
    XLA.set_rng_state(kept)
    assert written == [state]


@pytest.fixture
def package(monkeypatch):
    """Modules of torch_xla, as far as they are in use; they write down what is called."""
    calls = []
    names = ("torch_xla", "torch_xla.runtime", "torch_xla.distributed", "torch_xla.distributed.spmd")
    core = ("torch_xla.core", "torch_xla.core.xla_model")
    modules = {name: ModuleType(name) for name in (*names, *core)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    runtime, spmd = modules["torch_xla.runtime"], modules["torch_xla.distributed.spmd"]
    held = SimpleNamespace(spmd=False, mesh=None)
    runtime.is_spmd = lambda: held.spmd
    runtime.use_spmd = lambda: setattr(held, "spmd", True)
    runtime.global_runtime_device_count = lambda: 4
    spmd.Mesh = lambda ids, shape, names: SimpleNamespace(shape=shape, names=names, size=lambda: len(ids))
    spmd.set_global_mesh = lambda mesh: setattr(held, "mesh", mesh)
    spmd.get_global_mesh = lambda: held.mesh
    spmd.mark_sharding = lambda tensor, mesh, spec: calls.append((tensor.shape, spec))
    spmd.ShardingSpec = lambda mesh, spec: SimpleNamespace(xla_spec=lambda t: (spec, t.shape))
    modules["torch_xla"].sync = lambda: calls.append("sync")
    modules["torch_xla.core.xla_model"].mark_step = lambda: calls.append("mark_step")
    return SimpleNamespace(calls=calls, root=modules["torch_xla"])


def test_a_step_is_marked_by_any_version(package):
    xla.mark_step()
    del package.root.sync
    xla.mark_step()
    assert package.calls == ["sync", "mark_step"]


def test_one_process_drives_all_devices(package):
    assert xla.upload_options() == {}
    mesh = xla.use_mesh()
    assert (mesh.shape, mesh.names) == ((4, 1), ("fsdp", "model"))
    assert xla.is_shared()
    assert xla.use_mesh() is mesh
    (kind,) = xla.upload_options().values()
    assert isinstance(kind, RowSharding)


def test_rows_that_divide_evenly_are_shared(package):
    mesh = xla.use_mesh()
    for tensor in (torch.ones(8, 2), torch.ones(6), torch.ones(()), torch.ones(4)):
        xla.share_rows(tensor, mesh)
    assert package.calls == [((8, 2), ("fsdp", None)), ((4,), ("fsdp",))]
    sharding = RowSharding(mesh)
    assert sharding.xla_spec(torch.ones(8, 2)) == (("fsdp", None), (8, 2))
    assert sharding.xla_spec(torch.ones(12, 2)) == (("fsdp", None), (12, 2))
    assert sharding.xla_spec(torch.ones(6)) is None
