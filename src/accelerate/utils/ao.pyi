from accelerate.precision import (
    filter_linear_layers as filter_linear_layers,
    find_first_last_linear_layers as find_first_last_linear_layers,
)
from accelerate.utils import *
