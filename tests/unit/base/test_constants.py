"""The constants other projects import by name."""

import subprocess
import sys

import pytest
from torch import nn

from accelerate.base import DistributedType, constants
from accelerate.utils import constants as old_path


def test_wrapping_policies_keep_their_order():
    assert constants.FSDP_AUTO_WRAP_POLICY[:2] == ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"]


def test_layers_for_upcasting_are_torch_classes():
    layers = constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    assert nn.Linear in layers
    assert all(issubclass(layer, nn.Module) for layer in layers)


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="NOT_A_CONSTANT"):
        constants.NOT_A_CONSTANT  # noqa: B018


def test_every_label_of_data_parallelism_is_an_operation_type_of_torch():
    labels = {name for name in DistributedType.__members__ if name.startswith("MULTI_")}
    types = constants.TORCH_DISTRIBUTED_OPERATION_TYPES
    assert set(types) == labels | {"DEEPSPEED", "FSDP", "MEGATRON_LM", "TP"}
    assert len(types) == len(set(types))


def test_a_star_import_of_the_old_path_gives_the_constants_alone():
    names = {name for name in vars(constants) if name.isupper() and name != "TYPE_CHECKING"}
    assert set(old_path.__all__) == names | {"SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"}
    program = "from accelerate.utils.constants import *\nimport sys; print('accelerate.ops' in sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]
