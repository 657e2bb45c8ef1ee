"""The enumerations: their values are read from files, flags and other libraries."""

from typing import get_args

import pytest

from accelerate.base import enums
from accelerate.plugins import TorchDynamoPlugin


@pytest.mark.parametrize("kind", [enums.PrecisionType, enums.DynamoBackend, enums.LoggerType, enums.RNGType])
def test_base_enums_list_their_values(kind):
    values = kind.list()
    assert values == [member.value for member in kind]
    assert all(value in kind for value in values)
    assert "nothing" not in kind
    assert [str(member) for member in kind] == values


@pytest.mark.parametrize(
    "kind",
    [
        enums.DistributedType,
        enums.SageMakerDistributedType,
        enums.FP8BackendType,
        enums.ComputeEnvironment,
        enums.DynamoBackend,
        enums.PrecisionType,
    ],
)
def test_string_enums_equal_their_plain_string(kind):
    for member in kind:
        assert member == member.value
        assert kind(member.value) is member
        assert member in {member.value}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (enums.PrecisionName, enums.PrecisionType),
        (enums.RNGName, enums.RNGType),
        (enums.CommunicationHookName, enums.DDPCommunicationHookType),
    ],
)
def test_type_checkers_infer_the_values_of_an_enumeration(names, kind):
    assert set(get_args(names)) == {member.value for member in kind}


def test_type_checkers_accept_names_of_compilers_in_any_case():
    names = [member.value for member in enums.DynamoBackend]
    assert set(get_args(enums.DynamoName)) == {*names, *(name.lower() for name in names)}
    for name in get_args(enums.DynamoName):
        assert TorchDynamoPlugin(backend=name).backend == name.upper()
