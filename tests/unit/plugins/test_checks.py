"""The checks that plugins share."""

import pytest

from accelerate.base import ConfigurationError, DDPCommunicationHookType, DynamoBackend
from accelerate.plugins import at_least, one_of
from accelerate.plugins.checks import member


def test_a_known_choice_is_returned() -> None:
    assert one_of("mode", "b", ("a", "b")) == "b"


def test_an_unknown_choice_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigurationError, match=r"mode='c': .*a, b"):
        one_of("mode", "c", ("a", "b"))


@pytest.mark.parametrize("value", ["fp16", DDPCommunicationHookType.FP16])
def test_enum_members_are_found_by_member_and_by_value(value: object) -> None:
    assert member("hook", value, DDPCommunicationHookType) is DDPCommunicationHookType.FP16


def test_a_plain_string_names_a_member_of_a_string_enumeration() -> None:
    assert member("backend", "EAGER", DynamoBackend) is DynamoBackend.EAGER


def test_an_unknown_member_is_an_error_that_names_the_values() -> None:
    with pytest.raises(ConfigurationError, match=r"hook='zip': .*no, fp16, bf16, power_sgd"):
        member("hook", "zip", DDPCommunicationHookType)


def test_a_small_number_is_an_error() -> None:
    at_least("steps", 1, 1)
    with pytest.raises(ConfigurationError, match="steps=0"):
        at_least("steps", 0, 1)
