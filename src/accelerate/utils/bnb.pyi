from accelerate.big_modeling import dispatch_model as dispatch_model, init_empty_weights as init_empty_weights
from accelerate.quantization import (
    get_keys_to_not_convert as get_keys_to_not_convert,
    get_parameter_device as get_parameter_device,
    get_quantized_model_device_map as get_quantized_model_device_map,
    replace_with_bnb_layers as replace_with_bnb_layers,
)
from accelerate.utils import *
from accelerate.weights import quantize_and_offload_8bit as quantize_and_offload_8bit
