from accelerate.precision.amp import (
    AutocastForward as AutocastForward,
    MixedPrecision as MixedPrecision,
    Precision as Precision,
    ScaledPrecision as ScaledPrecision,
    explain_fp16_gradients as explain_fp16_gradients,
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accelerate.precision.fp8 import (
    ConvertLayers as ConvertLayers,
    TransformerEnginePrecision as TransformerEnginePrecision,
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    filter_linear_layers as filter_linear_layers,
    find_first_last_linear_layers as find_first_last_linear_layers,
    has_ao_layers as has_ao_layers,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accelerate.precision.resolve import (
    PRECISIONS as PRECISIONS,
    RECIPES as RECIPES,
    PrecisionRequest as PrecisionRequest,
    resolve_precision as resolve_precision,
)
