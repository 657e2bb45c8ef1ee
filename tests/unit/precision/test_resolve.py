"""The number format is chosen in one place, from one table."""

from __future__ import annotations

import pytest

from accelerate.base.errors import ConfigurationError
from accelerate.devices.catalogue import CPU
from accelerate.precision.amp import MixedPrecision, ScaledPrecision
from accelerate.precision.base import Precision
from accelerate.precision.resolve import PrecisionRequest, resolve


@pytest.mark.parametrize(
    ("name", "kind"), [("no", Precision), ("bf16", MixedPrecision), ("fp16", ScaledPrecision)]
)
def test_each_name_has_its_class(name: str, kind: type[Precision]) -> None:
    precision = resolve(PrecisionRequest(name, CPU))
    assert type(precision) is kind
    assert precision.name == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mixed_precision='fp4'.*no, bf16, fp16"):
        resolve(PrecisionRequest("fp4", CPU))
