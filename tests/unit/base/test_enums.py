"""The enumerations: their values are read from files, flags and other libraries."""

import pytest

from accelerate.base import enums


@pytest.mark.parametrize("kind", [enums.PrecisionType, enums.DynamoBackend, enums.LoggerType, enums.RNGType])
def test_base_enums_know_their_values(kind):
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


def test_distributed_type_names_are_its_values():
    assert {member.name: member.value for member in enums.DistributedType} == {
        name: name for name in enums.DistributedType.__members__
    }
    assert enums.DistributedType.MULTI_GPU in ["MULTI_GPU", "DEEPSPEED"]
