"""One table of optional third-party packages; every `is_x_available` is a row of it.

An answer is kept after the first question, so that asking on every step costs nothing.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, TypeVar

from packaging.version import parse

from accelerate.base.environ import parse_flag_from_env
from accelerate.base.errors import MissingPackageError
from accelerate.base.versions import is_torch_version

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True)
class Package:
    """One optional package.

    Attributes:
        module: The name it is imported by.
        distributions: Names on the package index that bring it, the usual one first.
        minimum: Oldest version that works; None: any.
    """

    module: str
    distributions: tuple[str, ...]
    minimum: str | None = None

    def version(self) -> str | None:
        """Return the installed version, or None when the package cannot be imported or has no metadata."""
        return _version(self.module, self.distributions)

    def available(self) -> bool:
        """Return whether the package is installed, in a version that works."""
        version = self.version()
        return version is not None and (self.minimum is None or parse(version) >= parse(self.minimum))


@functools.cache
def _version(module: str, distributions: tuple[str, ...]) -> str | None:
    # A folder that happens to have a package's name can be imported too: metadata proves an installation.
    if not _importable(module):
        return None
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # no parent package; a module put into sys.modules by hand
        return module in sys.modules


def _row(module: str, *distributions: str, minimum: str | None = None) -> tuple[str, Package]:
    return module, Package(module, distributions or (module,), minimum)


PACKAGES: dict[str, Package] = dict(
    (
        _row("aim"),
        _row("amdsmi"),
        _row("bitsandbytes", minimum="0.39.0"),
        _row("boto3"),
        _row("clearml"),
        _row("comet_ml", "comet-ml"),
        _row("datasets"),
        _row("deepspeed"),
        _row("dvclive"),
        _row("import_timer", "import-timer"),
        _row("lomo_optim", "lomo-optim"),
        _row("matplotlib"),
        _row("megatron", "megatron-lm", "megatron-core"),
        _row("mlflow", "mlflow", "mlflow-skinny"),
        _row("msamp", "ms-amp", "msamp"),
        _row("numpy"),
        _row("pandas"),
        _row("peft"),
        _row("pynvml", "nvidia-ml-py", "pynvml"),
        _row("pytest"),
        _row("rich"),
        _row("sagemaker"),
        _row("schedulefree"),
        _row("shtab", minimum="1.13"),
        _row("swanlab"),
        _row("tensorboard"),
        _row("tensorboardX"),
        _row("timm"),
        _row("torchao", minimum="0.6.1"),
        _row("torchdata"),
        _row("torchvision"),
        _row("tqdm"),
        _row("trackio"),
        _row("transformer_engine", "transformer-engine", "transformer_engine"),
        _row("transformers"),
        _row("triton", "triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
        _row("wandb"),
    )
)


def is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Return whether any package is installed.

    Args:
        pkg_name: The name it is imported by.
        metadata_name: Its name on the package index where that is another one.
    """
    return _version(pkg_name, (metadata_name or pkg_name,)) is not None


def require(package: str, feature: str) -> None:
    """Raise unless an optional package is there; to be called before it is imported.

    Args:
        package: The name it is imported by: a row of the table.
        feature: What needs it, as the beginning of the sentence "... needs it".

    Raises:
        MissingPackageError: If it is not installed or too old, with the command that installs it.
    """
    row = PACKAGES[package]
    if row.available():
        return
    wanted = row.distributions[0] + (f">={row.minimum}" if row.minimum else "")
    version = row.version()
    state = f"version {version} is installed" if version else "it is not installed"
    raise MissingPackageError(f"{feature} needs {wanted}, but {state}. Run `pip install '{wanted}'`.")


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of these libraries this process has imported already.

    Args:
        *library_names: Names by which they are imported.
    """
    return [name for name in library_names if name in sys.modules]


def _probe(name: str, package: str | None = None, minimum: str | None = None) -> Callable[[], bool]:
    row = PACKAGES[package or name]
    row = Package(row.module, row.distributions, minimum or row.minimum)

    def probe() -> bool:
        return row.available()

    probe.__name__ = probe.__qualname__ = f"is_{name}_available"
    probe.__doc__ = f"Return whether {row.distributions[0]} is installed."
    return probe


is_4bit_bnb_available = _probe("4bit_bnb", "bitsandbytes", "0.39.0")
is_8bit_bnb_available = _probe("8bit_bnb", "bitsandbytes", "0.37.2")
is_aim_available = _probe("aim")
is_amdsmi_available = _probe("amdsmi")
is_boto3_available = _probe("boto3")
is_clearml_available = _probe("clearml")
is_comet_ml_available = _probe("comet_ml")
is_datasets_available = _probe("datasets")
is_deepspeed_available = _probe("deepspeed")
is_dvclive_available = _probe("dvclive")
is_import_timer_available = _probe("import_timer")
is_lomo_available = _probe("lomo", "lomo_optim")
is_matplotlib_available = _probe("matplotlib")
is_mlflow_available = _probe("mlflow")
is_msamp_available = _probe("msamp")
is_pandas_available = _probe("pandas")
is_peft_available = _probe("peft")
is_pynvml_available = _probe("pynvml")
is_pytest_available = _probe("pytest")
is_sagemaker_available = _probe("sagemaker")
is_schedulefree_available = _probe("schedulefree")
is_swanlab_available = _probe("swanlab")
is_timm_available = _probe("timm")
is_torchao_available = _probe("torchao")
is_torchdata_available = _probe("torchdata")
is_torchdata_stateful_dataloader_available = _probe("torchdata_stateful_dataloader", "torchdata", "0.8.0")
is_torchvision_available = _probe("torchvision")
is_tqdm_available = _probe("tqdm")
is_trackio_available = _probe("trackio")
is_transformers_available = _probe("transformers")
is_wandb_available = _probe("wandb")


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard or tensorboardX is installed."""
    return PACKAGES["tensorboard"].available() or PACKAGES["tensorboardX"].available()


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, of at least this version when one is given."""
    version = PACKAGES["bitsandbytes"].version()
    return version is not None and (min_version is None or parse(version) >= parse(min_version))


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy is installed, of at least this version."""
    version = PACKAGES["numpy"].version()
    return version is not None and parse(version) >= parse(min_version)


@functools.cache
def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether the installed bitsandbytes says that it supports more than CUDA; imports it."""
    if not PACKAGES["bitsandbytes"].available():
        return False
    return "multi_backend" in getattr(import_module("bitsandbytes"), "features", ())


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM was asked for (`ACCELERATE_USE_MEGATRON_LM`) and can be imported."""
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and _importable("megatron.training")


def is_pippy_available() -> bool:
    """Return whether torch brings pipeline parallelism; true of every torch we support."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Return whether `torch.load` can be restricted to weights; true of every torch we support."""
    return is_torch_version(">=", "2.4.0")


def is_rich_available() -> bool:
    """Return whether rich is installed and asked for (`ACCELERATE_ENABLE_RICH`)."""
    return parse_flag_from_env("ACCELERATE_ENABLE_RICH") and PACKAGES["rich"].available()


def torchao_required(func: Decorated) -> Decorated:
    """Make a function raise `MissingPackageError` when it is called without torchao."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        require("torchao", f"`{func.__name__}`")
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # same call signature, by functools.wraps
