from accelerate.quantization.load import (
    get_keys_to_not_convert as get_keys_to_not_convert,
    get_parameter_device as get_parameter_device,
    get_quantized_model_device_map as get_quantized_model_device_map,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    load_and_quantize_model as load_and_quantize_model,
    name_unquantized as name_unquantized,
    replace_with_bnb_layers as replace_with_bnb_layers,
)
