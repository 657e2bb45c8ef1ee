"""Pipeline parallelism, in which ranks of an axis have different layers of a model.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate.base import PreparationError, listed
from accelerate.plugins import PipelineConfig
from accelerate.precision import Precision
from accelerate.strategies.axes import Axis
from accelerate.strategies.dtensors import named_parameters
from accelerate.strategies.pipeline.runner import Pipeline, check_model
from accelerate.strategies.pipeline.verification import Verification

AXIS = "pp"


class PipelineAxis(Axis):
    """Axis along which ranks have different layers.

    Attributes:
        pipelines: Pipelines of the models that are prepared for training.
        optimizer_names: Names of the parameters of prepared optimizers, see `PipelineState`.
        first_rank: First rank of the run with the stages of this rank.
    """

    def __init__(self, mesh: Any, config: PipelineConfig, device: torch.device) -> None:
        self.size = mesh[AXIS].size()
        self.group = mesh.get_group(AXIS)
        self.pipelines: dict[nn.Module, Pipeline] = {}
        self.optimizer_names: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        dim = mesh.mesh_dim_names.index(AXIS)
        row = mesh.mesh.movedim(dim, 0)[dist.get_rank(self.group)]
        self.first_rank = int(row.min())
        self._columns = mesh.mesh.movedim(dim, 0).reshape(self.size, -1).T.tolist()
        self._config, self._device = config, device
        self._verifications: dict[nn.Module, Verification] = {}

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a trained model that cannot be split."""
        if self.splits(model):
            check_model(model)

    def splits(self, model: nn.Module) -> bool:
        """Returns whether a model is split into stages, as it is if the run trains it."""
        return any(parameter.requires_grad for parameter in model.parameters())

    def keep_structure(self, model: nn.Module, precision: Precision) -> None:
        """Copies the structure of a model that is not changed yet, with which its pipeline is compared."""
        if self._config.verify:
            self._verifications[model] = Verification(model, precision.autocast, precision.name)

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        """Removes the layers of other ranks from a model."""
        pipeline = Pipeline(model, self._config, self.group, self._device)
        pipeline.verification = self._verifications.pop(model, None)
        self.pipelines[model] = pipeline
        own = named_parameters(model)
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in pipeline.holders.items():
            if name in pipeline.parameter_names:
                by_ranks.setdefault(tuple(sorted(ranks)), []).append(name)
        for holders, names in sorted(by_ranks.items()):
            if len(holders) > 1:
                enumerate_groups: Any = dist.new_subgroups_by_enumeration
                group, _ = enumerate_groups([[column[rank] for rank in holders] for column in self._columns])
                if dist.get_rank(self.group) in holders:
                    pipeline.shared.append(([name for name in names if name in own], group))
        return model

    def stages_to_shard(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules of this rank's stages, which FSDP shards.

        Raises:
            PreparationError: A parameter is on the meta device.
        """
        pipeline = self.pipelines[model]
        parameters = named_parameters(model)
        tied = {
            parameters[name]
            for name, stages in pipeline.model.holders.items()
            if len(stages) > 1 and name in parameters
        }
        for stage in pipeline.stages.values():
            stage.whole_on_ranks |= tied.intersection(stage.parameters())
        if on_meta := [name for name, p in parameters.items() if p.is_meta]:
            raise PreparationError(
                f"{listed(on_meta)} of {type(model).__name__} have no values yet, and a pipeline does not "
                "load them from rank 0. Load the model on each rank before `prepare`."
            )
        return list(pipeline.stages.values())

    def combine_norms(self, norm: Tensor, norm_type: float) -> Tensor:
        """Returns the norm of the gradients of all stages from that of this rank's stages."""
        is_max, norm = norm_type == float("inf"), norm.float()  # stages may have other dtypes
        power = norm if is_max else norm**norm_type
        dist.all_reduce(power, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=self.group)
        return power if is_max else power ** (1.0 / norm_type)

    def repeated_parameters(self) -> set[int]:
        """Returns the ids of parameters of this rank that an earlier rank of the pipeline has too."""
        rank = dist.get_rank(self.group)
        return {
            id(pipeline.model.model.get_parameter(name))
            for pipeline in self.pipelines.values()
            for names, _ in pipeline.shared
            for name in names
            if min(pipeline.holders[name]) < rank
        }
