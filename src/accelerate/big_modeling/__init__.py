"""Models larger than a device: plan, load, dispatch."""

from accelerate.big_modeling.device_map import check_device_map as check_device_map
from accelerate.big_modeling.load import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.weights.store import OffloadedWeightsLoader as OffloadedWeightsLoader
from accelerate.weights.store import extract_submodules_state_dict as extract_submodules_state_dict
from accelerate.weights.store import offload_state_dict as offload_state_dict
from accelerate.weights.tied import find_tied_parameters as find_tied_parameters
from accelerate.weights.tied import retie_parameters as retie_parameters
