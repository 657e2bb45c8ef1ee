"""Comparison of installed versions with requirements."""

from functools import cache
from typing import TYPE_CHECKING, Any

from packaging.version import Version, parse

from accelerate.base.constants import STR_OPERATION_TO_FUNC
from accelerate.base.errors import MissingPackageError, wrong_value

if TYPE_CHECKING:
    torch_version: Version


@cache
def installed_version(distribution: str) -> Version:
    """Returns the version of an installed distribution, read from its metadata without importing it."""
    from importlib import metadata  # slow to import, and needed only here

    try:
        return parse(metadata.version(distribution))
    except metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            f"The version of {distribution!r} was asked for, but it is not installed. "
            f"Install it with `pip install {distribution}`."
        ) from error


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compares a version with a requirement.

    Args:
        library_or_version: Name of an installed distribution, or a version already parsed.
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        requirement_version: The right-hand side, such as `"2.6.0"`.

    Returns:
        Whether the comparison holds.

    Raises:
        ConfigurationError: If the operation is none of the six.
        MissingPackageError: If the named library is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        known = ", ".join(STR_OPERATION_TO_FUNC)
        raise wrong_value("operation", operation, "not a comparison", f"use one of {known}")
    if isinstance(library_or_version, str):
        library_or_version = installed_version(library_or_version)
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))


@cache
def is_torch_version(operation: str, version: str) -> bool:
    """Compares the installed torch with a version, without importing torch.

    Args:
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        version: The right-hand side, such as `"2.6.0"`.
    """
    return compare_versions("torch", operation, version)


def __getattr__(name: str) -> Any:
    # Reading metadata takes milliseconds, so the version is read on first access.
    if name != "torch_version":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return installed_version("torch")
