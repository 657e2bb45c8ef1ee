"""The error hierarchy and the text of the commonest error."""

import pytest

from accelerate.base import errors


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.PreparationError, errors.ConfigurationError),
        (errors.MissingPackageError, ImportError),
        (errors.StateError, RuntimeError),
        (errors.LaunchError, RuntimeError),
    ],
)
def test_errors_can_be_caught_as_ours_and_as_builtins(kind, builtin):
    assert issubclass(kind, errors.AccelerateError)
    assert issubclass(kind, builtin)


def test_wrong_value_names_value_reason_and_mend():
    error = errors.wrong_value("--num_processes", 0, "no process would run.", "give at least 1")
    assert isinstance(error, errors.ConfigurationError)
    assert str(error) == "--num_processes=0: no process would run. Give at least 1."
