"""Table of optional third-party packages with one probe, `is_NAME_available`, for each row.

The result of a probe is cached, so that calling it on every step costs nothing.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from packaging.version import parse

from accelerate.base.environ import parse_flag_from_env
from accelerate.base.errors import MissingPackageError
from accelerate.base.versions import is_torch_version

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True)
class Package:
    """Optional third-party package."""

    module: str
    distributions: tuple[str, ...]  # names on the package index that provide it, the usual one first
    minimum: str | None = None  # the oldest version that works

    def version(self) -> str | None:
        """Returns the installed version, or None when the package cannot be imported or has no metadata."""
        return _version(self.module, self.distributions)

    def available(self) -> bool:
        """Returns whether the package is installed in a supported version."""
        version = self.version()
        return version is not None and (self.minimum is None or parse(version) >= parse(self.minimum))


@functools.cache
def _version(module: str, distributions: tuple[str, ...]) -> str | None:
    # A folder with the name of a package can be imported too. Only metadata proves an installation.
    if not _importable(module):
        return None
    from importlib import metadata  # slow to import, and a launch checks no package

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # no parent package, or a module put into sys.modules by hand
        return module in sys.modules


PACKAGES: dict[str, Package] = {}
"""Name by which a package is imported -> its row."""


def _package(
    module: str, *distributions: str, minimum: str | None = None, name: str | None = None
) -> Callable[[], bool]:
    """Adds a row to `PACKAGES` and returns its probe, which is named after the module by default."""
    package = Package(module, distributions or (module,), minimum)
    PACKAGES.setdefault(module, package)

    def probe() -> bool:
        return package.available()

    probe.__name__ = probe.__qualname__ = f"is_{name or module}_available"
    probe.__doc__ = f"Returns whether {package.distributions[0]} is installed."
    return probe


is_aim_available = _package("aim")
is_amdsmi_available = _package("amdsmi")
is_4bit_bnb_available = _package("bitsandbytes", minimum="0.39.0", name="4bit_bnb")
is_8bit_bnb_available = _package("bitsandbytes", minimum="0.37.2", name="8bit_bnb")
is_boto3_available = _package("boto3")
is_clearml_available = _package("clearml")
is_comet_ml_available = _package("comet_ml", "comet-ml")
is_datasets_available = _package("datasets")
is_deepspeed_available = _package("deepspeed")
is_dvclive_available = _package("dvclive")
is_import_timer_available = _package("import_timer", "import-timer")
is_lomo_available = _package("lomo_optim", "lomo-optim", name="lomo")
is_matplotlib_available = _package("matplotlib")
is_mlflow_available = _package("mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _package("msamp", "ms-amp", "msamp")
is_pandas_available = _package("pandas")
is_peft_available = _package("peft")
is_pynvml_available = _package("pynvml", "nvidia-ml-py", "pynvml")
is_pytest_available = _package("pytest")
is_sagemaker_available = _package("sagemaker")
is_schedulefree_available = _package("schedulefree")
is_swanlab_available = _package("swanlab")
is_timm_available = _package("timm")
is_torchao_available = _package("torchao", minimum="0.6.1")
is_torchdata_available = _package("torchdata")
is_torchdata_stateful_dataloader_available = _package(
    "torchdata", minimum="0.8.0", name="torchdata_stateful_dataloader"
)
is_torchft_available = _package("torchft")
is_torchvision_available = _package("torchvision")
is_tqdm_available = _package("tqdm")
is_trackio_available = _package("trackio")
is_transformer_engine_available = _package("transformer_engine", "transformer-engine", "transformer_engine")
is_transformers_available = _package("transformers")
is_triton_available = _package(
    "triton", "triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"
)
is_wandb_available = _package("wandb")
_package("megatron", "megatron-lm", "megatron-core")
_package("numpy")
_package("rich")
_package("shtab", minimum="1.13")
_package("tensorboard")
_package("tensorboardX")


def is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Returns whether a package is installed.

    `metadata_name` is its name on the package index if that differs.
    """
    return _version(pkg_name, (metadata_name or pkg_name,)) is not None


def require(package: str, feature: str) -> None:
    """Raises an error if a package of `PACKAGES` is not installed.

    `feature` names what requires the package, and begins the message.
    """
    row = PACKAGES[package]
    if row.available():
        return
    requirement = row.distributions[0] + (f">={row.minimum}" if row.minimum else "")
    version = row.version()
    state = f"version {version} is installed" if version else "it is not installed"
    raise MissingPackageError(
        f"{feature} needs {requirement}, but {state}. Run `pip install '{requirement}'`."
    )


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Returns the libraries, by import name, that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def is_tensorboard_available() -> bool:
    """Returns whether TensorBoard or tensorboardX is installed."""
    return PACKAGES["tensorboard"].available() or PACKAGES["tensorboardX"].available()


def is_bnb_available(min_version: str | None = None) -> bool:
    """Returns whether bitsandbytes is installed, optionally in a minimum version."""
    return replace(PACKAGES["bitsandbytes"], minimum=min_version).available()


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Returns whether numpy is installed in a minimum version."""
    return replace(PACKAGES["numpy"], minimum=min_version).available()


@functools.cache
def is_bitsandbytes_multi_backend_available() -> bool:
    """Returns whether the installed bitsandbytes, which is imported, supports backends besides CUDA."""
    if not PACKAGES["bitsandbytes"].available():
        return False
    return "multi_backend" in getattr(import_module("bitsandbytes"), "features", ())


def is_megatron_lm_available() -> bool:
    """Returns whether Megatron-LM is requested (`ACCELERATE_USE_MEGATRON_LM`) and can be imported."""
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and _importable("megatron.training")


def is_pippy_available() -> bool:
    """Returns whether torch provides pipeline parallelism, as every supported torch does."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Returns whether `torch.load` accepts `weights_only`, as it does in every supported torch."""
    return is_torch_version(">=", "2.4.0")


def is_rich_available() -> bool:
    """Returns whether rich is installed and requested (`ACCELERATE_ENABLE_RICH`)."""
    return parse_flag_from_env("ACCELERATE_ENABLE_RICH") and PACKAGES["rich"].available()


def torchao_required(func: Decorated) -> Decorated:
    """Wraps a function so that it raises `MissingPackageError` without torchao."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        require("torchao", f"`{func.__name__}`")
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # same call signature, by functools.wraps
