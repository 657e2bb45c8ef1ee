"""Share the layers of a model between the processes of one axis.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from accelerate.strategies.axes.plans import plan_of
from accelerate.weights import find_tied_parameters, retie_parameters

AXIS = "tp"


def split_layers(model: nn.Module, mesh: Any) -> nn.Module:
    """Share the layers of a model along the axis for it, in place; called on all ranks.

    Args:
        model: has a `tp_plan`, or is shared already.
        mesh: the mesh of the run; None, or one without that axis, leaves the model as it is.

    Raises:
        PreparationError: the model has no plan that fits.
    """
    if (
        mesh is None
        or AXIS not in mesh.mesh_dim_names
        or any(isinstance(p, DTensor) for p in model.parameters())
    ):
        return model
    tied = find_tied_parameters(model)
    parallelize_module(model, mesh[AXIS], plan_of(model))
    retie_parameters(model, tied)
    return model
