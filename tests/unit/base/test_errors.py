"""The error hierarchy and the text of the commonest error."""

import copy
import pickle
from traceback import format_exception_only

import pytest

from accelerate.base import CheckpointError, ConfigurationError, as_builtin, errors, like, wrong_value


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


def test_wrong_value_names_value_reason_and_fix():
    error = errors.wrong_value("--num_processes", 0, "no process would run.", "give at least 1")
    assert isinstance(error, errors.ConfigurationError)
    assert str(error) == "--num_processes=0: no process would run. Give at least 1."


@pytest.mark.parametrize("value", ["a" * 10**6, 10**5000, ["a" * 1000]], ids=["text", "number", "list"])
def test_long_values_are_shortened(value):
    assert len(str(errors.wrong_value("x", value, "too long", "shorten it"))) < 2 * errors.LONGEST


def test_a_shortened_text_has_its_beginning_and_its_end():
    text = "".join(chr(ord("a") + n % 26) for n in range(100))
    assert errors.shortened(text, 60) == f"{text[:20]}...{text[-40:]}"
    assert errors.shortened(text, 100) == text


def test_values_that_cannot_be_written_are_named_by_their_type():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert errors.shown(nested) == "<list>"
    while nested:  # one by one: freeing them all at once would take as many frames
        nested = nested[0]


@pytest.mark.parametrize(
    "kind",
    [FileNotFoundError, KeyError, AttributeError, TypeError, NotImplementedError, EOFError, AssertionError],
)
@pytest.mark.parametrize("own", [ConfigurationError, CheckpointError])
def test_an_error_is_a_built_in_one_too(own: type[Exception], kind: type[Exception]) -> None:
    error = as_builtin(own("a is wrong"), kind)
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(one, own)
        assert isinstance(one, kind)
        assert str(one) == "a is wrong"
        assert "".join(format_exception_only(one)) == f"accelerate.base.errors.{own.__name__}: a is wrong\n"


def test_an_error_that_is_of_the_class_stays_the_same_object() -> None:
    error = ConfigurationError("a")
    assert as_builtin(error, ValueError, Exception) is error
    assert as_builtin(error) is error


def test_an_error_is_of_the_class_of_its_cause() -> None:
    class Own(OSError):
        pass

    assert isinstance(like(CheckpointError("a"), FileNotFoundError("b")), FileNotFoundError)
    assert isinstance(like(CheckpointError("a"), Own("b")), OSError)
    joined = as_builtin(CheckpointError("b"), TypeError)
    assert isinstance(like(CheckpointError("a"), joined), TypeError)
    plain = CheckpointError("a")
    assert like(plain, pickle.UnpicklingError("b")) is plain
    decoding = like(CheckpointError("a"), UnicodeDecodeError("utf-8", b"\x80", 0, 1, "invalid start byte"))
    assert isinstance(decoding, UnicodeError)
    assert str(decoding) == "a"
    assert isinstance(like(OSError("a"), RuntimeError("b")), RuntimeError)


def test_a_wrong_value_may_be_of_further_classes() -> None:
    error = wrong_value("size", None, "not a size", "give one", AttributeError)
    assert isinstance(error, AttributeError)
    assert str(error) == "size=None: not a size. Give one."
