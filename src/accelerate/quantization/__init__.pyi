from accelerate.quantization.layers import (
    get_keys_to_not_convert as get_keys_to_not_convert,
    get_parameter_device as get_parameter_device,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    replace_with_bnb_layers as replace_with_bnb_layers,
)
from accelerate.quantization.load import (
    get_quantized_model_device_map as get_quantized_model_device_map,
    load_and_quantize_model as load_and_quantize_model,
    name_kept as name_kept,
)
