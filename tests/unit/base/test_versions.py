"""Comparing installed versions with requirements."""

from importlib import metadata

import pytest
from packaging.version import Version, parse

from accelerate.base import ConfigurationError, MissingPackageError, versions


@pytest.mark.parametrize(
    ("operation", "holds"),
    [("<", True), ("<=", True), ("==", False), ("!=", True), (">=", False), (">", False)],
)
def test_compare_a_parsed_version(operation, holds):
    assert versions.compare_versions(parse("1.9"), operation, "1.10") is holds


def test_compare_an_installed_library():
    assert versions.compare_versions("torch", ">=", "2.6")
    assert versions.compare_versions("torch", "==", metadata.version("torch"))
    assert versions.is_torch_version("<", "99")


def test_unknown_operation_and_library_are_refused():
    with pytest.raises(ConfigurationError, match="operation='~='"):
        versions.compare_versions("torch", "~=", "2.6")
    with pytest.raises(MissingPackageError, match="no-such-library"):
        versions.compare_versions("no-such-library", ">=", "1")


def test_an_unknown_comparison_names_those_there_are():
    with pytest.raises(ValueError, match=">, >=, =="):
        versions.compare_versions("1.0", "~", "1.0")


def test_torch_version_is_read_on_demand():
    assert versions.torch_version == Version(metadata.version("torch"))
    with pytest.raises(AttributeError, match="numpy_version"):
        versions.numpy_version  # noqa: B018
