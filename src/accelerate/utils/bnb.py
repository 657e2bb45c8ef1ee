"""Old import path of quantization by bitsandbytes."""

from accelerate.base.packages import (
    is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available,
)
from accelerate.big_modeling.budget import get_balanced_memory as get_balanced_memory
from accelerate.big_modeling.device_map import infer_auto_device_map as infer_auto_device_map
from accelerate.big_modeling.dispatch import dispatch_model as dispatch_model
from accelerate.big_modeling.init import init_empty_weights as init_empty_weights
from accelerate.big_modeling.load import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.quantization.device_map import (
    get_quantized_model_device_map as get_quantized_model_device_map,
)
from accelerate.quantization.layers import (
    get_keys_to_not_convert as get_keys_to_not_convert,
    get_parameter_device as get_parameter_device,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    replace_with_bnb_layers as replace_with_bnb_layers,
)
from accelerate.quantization.load import load_and_quantize_model as load_and_quantize_model
from accelerate.weights.int8 import quantize_and_offload_8bit as quantize_and_offload_8bit
from accelerate.weights.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accelerate.weights.store import offload_weight as offload_weight
from accelerate.weights.tied import find_tied_parameters as find_tied_parameters
