"""Old import path of quantization by bitsandbytes."""

from accelerate.base import (
    is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available,
)
from accelerate.big_modeling import (
    dispatch_model as dispatch_model,
    get_balanced_memory as get_balanced_memory,
    infer_auto_device_map as infer_auto_device_map,
    init_empty_weights as init_empty_weights,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from accelerate.plugins import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.quantization import (
    get_keys_to_not_convert as get_keys_to_not_convert,
    get_parameter_device as get_parameter_device,
    get_quantized_model_device_map as get_quantized_model_device_map,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    load_and_quantize_model as load_and_quantize_model,
    replace_with_bnb_layers as replace_with_bnb_layers,
)
from accelerate.weights import (
    find_tied_parameters as find_tied_parameters,
    offload_weight as offload_weight,
    quantize_and_offload_8bit as quantize_and_offload_8bit,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
