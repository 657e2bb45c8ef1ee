"""Installing torch_xla in Google Colab."""

import subprocess
import sys

import pytest
import torch
from packaging.version import Version

from accelerate.base.errors import StateError
from accelerate.devices.xla import count_chips, install_xla


@pytest.mark.parametrize(
    ("files", "count"), [([], 0), (["accel0", "accel1"], 2), (["vfio/0", "vfio/1", "vfio/vfio"], 2)]
)
def test_chips_are_device_files(files, count, tmp_path):
    (tmp_path / "vfio").mkdir()
    for name in files:
        (tmp_path / name).touch()
    assert count_chips(tmp_path) == count


def test_elsewhere_it_is_refused(monkeypatch):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    with pytest.raises(StateError, match="Google Colab"):
        install_xla()


@pytest.mark.parametrize("upgrade", [True, False])
def test_in_colab_pip_is_asked_for_the_release_of_torch(upgrade, monkeypatch):
    commands = []
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append((command, check)))
    install_xla(upgrade=upgrade)
    ((command, check),) = commands
    assert check
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert f"torch_xla[tpu]=={Version(torch.__version__).public}" in command
    assert ("--upgrade" in command) is upgrade
