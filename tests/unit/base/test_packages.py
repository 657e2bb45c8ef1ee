"""The table of optional packages and the probes that are its rows."""

import inspect
import sys
from importlib import metadata
from types import ModuleType

import pytest

from accelerate.base import MissingPackageError, packages

PROBES = [
    (name, probe)
    for name, probe in vars(packages).items()
    if name.startswith("is_") and name.endswith("_available") and name != "is_package_available"
]


@pytest.fixture
def forget():
    """Clear the cached probes before and after a test that changes what is installed."""
    packages._version.cache_clear()
    packages.is_bitsandbytes_multi_backend_available.cache_clear()
    yield
    packages._version.cache_clear()
    packages.is_bitsandbytes_multi_backend_available.cache_clear()


@pytest.fixture
def install(monkeypatch, forget):
    """Pretend that a package is installed in some version."""
    installed = {}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)

    def pretend(module, distribution, number):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        installed[distribution] = number

    return pretend


@pytest.mark.parametrize(("name", "probe"), PROBES)
def test_every_probe_answers_yes_or_no_without_arguments(name, probe):
    assert isinstance(probe(), bool)
    assert probe.__name__ == name
    assert probe.__doc__
    assert all(p.default is not p.empty for p in inspect.signature(probe).parameters.values())


def test_installed_packages_are_found():
    assert packages.is_numpy_available()
    assert packages.is_pytest_available()
    assert packages.is_tqdm_available()
    assert not packages.is_numpy_available("99")


def test_a_folder_of_the_same_name_is_no_installation(tmp_path, monkeypatch, forget):
    (tmp_path / "dvclive").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not packages.is_dvclive_available()


def test_a_module_in_sys_modules_is_available_with_its_metadata(install):
    assert not packages.is_wandb_available()
    packages._version.cache_clear()
    install("wandb", "wandb", "0.17")
    assert packages.is_wandb_available()


def test_other_names_on_the_index(install):
    install("pynvml", "pynvml", "11.5")
    install("comet_ml", "comet-ml", "3.0")
    assert packages.is_pynvml_available()
    assert packages.is_comet_ml_available()
    assert packages.is_package_available("comet_ml", "comet-ml")
    assert not packages.is_package_available("comet_ml")


def test_packages_below_their_minimum_version_are_unavailable(install):
    install("bitsandbytes", "bitsandbytes", "0.38.1")
    install("torchdata", "torchdata", "0.7.1")
    install("torchao", "torchao", "0.6.0")
    assert packages.is_bnb_available()
    assert not packages.is_bnb_available("0.39.0")
    assert packages.is_8bit_bnb_available()
    assert not packages.is_4bit_bnb_available()
    assert packages.is_torchdata_available()
    assert not packages.is_torchdata_stateful_dataloader_available()
    assert not packages.is_torchao_available()


def test_tensorboard_has_two_packages(install):
    assert not packages.is_tensorboard_available()
    packages._version.cache_clear()
    install("tensorboardX", "tensorboardX", "2.6")
    assert packages.is_tensorboard_available()


def test_features_of_bitsandbytes_decide_on_multi_backend(install):
    install("bitsandbytes", "bitsandbytes", "0.45.0")
    assert not packages.is_bitsandbytes_multi_backend_available()
    packages.is_bitsandbytes_multi_backend_available.cache_clear()
    sys.modules["bitsandbytes"].features = {"multi_backend"}
    assert packages.is_bitsandbytes_multi_backend_available()


def test_rich_and_megatron_are_enabled_by_variables(monkeypatch):
    assert not packages.is_rich_available()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "true")
    assert packages.is_rich_available()
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert not packages.is_megatron_lm_available()


def test_require_names_feature_package_and_command(install):
    with pytest.raises(
        MissingPackageError, match=r"Logging to W&B needs wandb, but it is not installed.*pip install"
    ):
        packages.require("wandb", "Logging to W&B")
    install("torchao", "torchao", "0.5.0")
    packages._version.cache_clear()
    with pytest.raises(
        MissingPackageError, match=r"FP8 needs torchao>=0\.6\.1, but version 0\.5\.0 is installed"
    ):
        packages.require("torchao", "FP8")
    install("timm", "timm", "1.0")
    packages.require("timm", "This")


def test_torchao_required(install):
    @packages.torchao_required
    def convert(x):
        return x

    with pytest.raises(MissingPackageError, match="`convert` needs torchao"):
        convert(1)
    packages._version.cache_clear()
    install("torchao", "torchao", "0.18.0")
    assert convert(1) == 1


def test_imported_libraries_are_listed():
    assert packages.are_libraries_initialized("pytest", "no_such_library") == ["pytest"]
