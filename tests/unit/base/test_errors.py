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


@pytest.mark.parametrize("value", ["a" * 10**6, 10**5000, ["a" * 1000]], ids=["text", "number", "list"])
def test_long_values_are_shortened(value):
    assert len(str(errors.wrong_value("x", value, "too long", "shorten it"))) < 2 * errors.LONGEST


def test_values_that_cannot_be_written_are_named_by_their_type():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert errors.shown(nested) == "<list>"
    while nested:  # one by one: freeing them all at once would take as many frames
        nested = nested[0]
