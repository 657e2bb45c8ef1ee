"""Old import path of FP8 through Transformer Engine."""

from accelerate.devices import (
    is_hpu_available as is_hpu_available,
    is_transformer_engine_available as is_transformer_engine_available,
)
from accelerate.precision import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accelerate.weights import GatheredParameters as GatheredParameters
