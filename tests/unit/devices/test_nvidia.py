"""Calls of nvidia-smi, replaced by a script, and how its output is read."""

import shutil

import pytest

from accelerate.base import StateError
from accelerate.devices import nvidia


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a script in the place of nvidia-smi that answers each field it is asked about from a table."""
    program = tmp_path / "nvidia-smi"
    nvidia.query.cache_clear()
    nvidia.driver_present.cache_clear()

    def install(gpus, exit_code=0):
        rows = repr(gpus)
        program.write_text(
            "#!/usr/bin/env python3\n"
            "import sys\n"
            f"if {exit_code}: sys.exit('driver not loaded')\n"
            "fields = sys.argv[1].removeprefix('--query-gpu=').split(',')\n"
            f"for gpu in {rows}: print(', '.join(gpu[field] for field in fields))\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name: str(program))

    yield install
    nvidia.query.cache_clear()
    nvidia.driver_present.cache_clear()


def gpu(index, name="NVIDIA H100", driver="560.28", capability="9.0"):
    return {
        "index": str(index),
        "uuid": f"GPU-{index}{index}{index}-abc",
        "name": name,
        "driver_version": driver,
        "compute_cap": capability,
        "pci.bus_id": f"00000000:0{index}:00.0",
    }


@pytest.fixture
def no_nvidia_smi(monkeypatch):
    nvidia.query.cache_clear()
    nvidia.driver_present.cache_clear()
    monkeypatch.setattr(nvidia, "executable", lambda: None)
    yield
    nvidia.driver_present.cache_clear()


def test_names_count_and_driver(nvidia_smi):
    nvidia_smi([gpu(0), gpu(1, name="NVIDIA A100")])
    assert nvidia.get_gpu_info() == (["NVIDIA H100", "NVIDIA A100"], 2)
    assert nvidia.get_driver_version() == "560.28"


def test_without_nvidia_smi(no_nvidia_smi):
    assert nvidia.check_cuda_p2p_ib_support() is True
    assert nvidia.check_cuda_fp8_capability() is False
    with pytest.raises(StateError, match="install the NVIDIA driver"):
        nvidia.get_gpu_info()


def test_a_failure_of_nvidia_smi_gives_a_warning_and_no_gpus(nvidia_smi, caplog):
    nvidia_smi([], exit_code=9)
    assert nvidia.driver_present() is nvidia.driver_present() is False
    assert ["driver not loaded" in record.getMessage() for record in caplog.records] == [True]
    assert nvidia.check_cuda_fp8_capability() is False
    with pytest.raises(StateError, match="driver not loaded"):
        nvidia.get_driver_version()


def test_a_driver_without_gpus(nvidia_smi):
    nvidia_smi([])
    assert nvidia.get_gpu_info() == ([], 0)
    assert nvidia.check_cuda_fp8_capability() is False
    with pytest.raises(StateError, match="lists no GPU"):
        nvidia.get_driver_version()


@pytest.mark.parametrize(
    ("name", "count", "driver", "supported"),
    [
        ("NVIDIA GeForce RTX 4090", 2, "535.0", False),
        ("NVIDIA GeForce RTX 4090", 1, "535.0", True),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.07", True),
        ("NVIDIA GeForce RTX 3090", 2, "535.0", True),
    ],
)
def test_peer_to_peer(name, count, driver, supported, nvidia_smi):
    nvidia_smi([gpu(index, name=name, driver=driver) for index in range(count)])
    assert nvidia.check_cuda_p2p_ib_support() is supported


@pytest.mark.parametrize(
    ("capabilities", "capable"), [(["9.0"], True), (["8.9"], True), (["9.0", "8.6"], False)]
)
def test_fp8(capabilities, capable, nvidia_smi):
    nvidia_smi([gpu(index, capability=capability) for index, capability in enumerate(capabilities)])
    assert nvidia.check_cuda_fp8_capability() is capable


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1,7,2", [1]),
        ("GPU-222,GPU-000-abc", [2, 0]),
        ("MIG-GPU-5", [0]),
    ],
)
def test_visible_gpus_in_the_order_of_the_process(visible, indices, nvidia_smi):
    nvidia_smi([gpu(0), gpu(1), gpu(2)])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nvidia.visible_indices(environ) == indices
