"""Old import path of FP8 through torchao."""

from accelerate.base import is_torchao_available as is_torchao_available, torchao_required as torchao_required
from accelerate.precision import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    filter_linear_layers as filter_linear_layers,
    find_first_last_linear_layers as find_first_last_linear_layers,
    has_ao_layers as has_ao_layers,
)
