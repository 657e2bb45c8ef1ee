"""Each choice of a run has its layer, and a run without a choice has no layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import DynamoBackend
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies import Layer, RunRequest, compose
from accelerate.strategies.axes import ContextAxis, ExpertAxis, SequenceAxis, TensorAxis, UlyssesAxis
from accelerate.strategies.compilation import Compilation
from accelerate.strategies.composition import LAYERS
from accelerate.strategies.layer import entered
from accelerate.strategies.sharded_models import ShardedModels


class StrategyOfSizes:
    """Strategy of a mesh whose dimensions have two ranks."""

    flattens_parameters = False
    holds_whole_models = True

    def __init__(self, sizes: dict[str, Any] | None = None, *, shards_models: bool = False) -> None:
        parallelism = None if sizes is None else ParallelismConfig(**sizes)
        request = RunRequest(parallelism=parallelism)
        self.session: Any = SimpleNamespace()
        self.context = SimpleNamespace(
            request=request, mesh=None, mixed_precision="no", session=self.session, device=torch.device("cpu")
        )
        self.shards_models = shards_models
        self.layers: tuple[Layer, ...] = ()
        self.admit: Any = None

    def keeps_sharding(self, model: nn.Module) -> bool:
        return hasattr(model, "is_sharded")


def composed(*args: Any, **options: Any) -> Any:
    strategy: Any = StrategyOfSizes(*args, **options)
    return compose(strategy)


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        (None, []),
        ({}, []),
        ({"dp_replicate_size": 2}, []),
        ({"tp_size": 2}, [TensorAxis]),
        ({"cp_size": 2}, [ContextAxis]),
        ({"ep_size": 2}, [ExpertAxis, ShardedModels]),
        ({"tp_size": 2, "cp_size": 2}, [ContextAxis, TensorAxis]),
        ({"tp_size": 2, "ep_size": 2}, [ExpertAxis, TensorAxis, ShardedModels]),
        ({"sp_size": 2}, [UlyssesAxis]),
        ({"sp_size": 2, "sp_backend": "torch"}, [SequenceAxis]),
        ({"cp_size": 2, "sp_size": 2, "sp_backend": "torch"}, [SequenceAxis]),
    ],
)
def test_layers_follow_the_sizes(sizes: dict[str, Any] | None, kinds: list[type[Layer]]) -> None:
    assert [type(layer) for layer in composed(sizes).layers] == kinds


def test_a_strategy_that_shards_models_begins_with_their_meshes() -> None:
    assert [type(layer) for layer in composed(shards_models=True).layers] == [ShardedModels]


def test_a_sharded_model_adds_its_layer_once() -> None:
    strategy, model = composed({"tp_size": 2}), nn.Linear(1, 1)
    strategy.admit(strategy, model)
    assert [type(layer) for layer in strategy.layers] == [TensorAxis]
    model.is_sharded = True  # type: ignore[assignment]
    strategy.admit(strategy, model)
    strategy.admit(strategy, model)
    assert [type(layer) for layer in strategy.layers] == [TensorAxis, ShardedModels]


def test_a_backend_that_is_set_later_compiles_the_next_model() -> None:
    strategy = composed()
    strategy.admit(strategy, nn.Linear(1, 1))
    assert strategy.layers == ()
    strategy.context.request.dynamo.backend = DynamoBackend.EAGER
    strategy.admit(strategy, nn.Linear(1, 1))
    assert [type(layer) for layer in strategy.layers] == [Compilation]


def test_a_layer_changes_nothing_by_default() -> None:
    layer, model = Layer(), nn.Linear(1, 1)
    assert layer.transform_model(model) is model
    assert layer.compile(model) is model
    assert layer.keep_model(model, lambda model: model, to_device=True, evaluation=False) is None
    assert layer.transform_loader("loader", model) == "loader"
    assert layer.loader_mesh("mesh") == "mesh"
    assert layer.train_batch(model, None, None, lambda loss: loss, is_sum=False) is None
    assert layer.gradient_norm(lambda parameters, norm_type: torch.tensor(norm_type), [], 2.0) == 2.0
    with layer.split_batch(buffers=[torch.ones(3)], buffer_seq_dims=[0]), entered([]):
        pass


def test_the_page_of_the_architecture_has_the_table_of_layers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    written = [(row[0].strip("|` "), row[-1].strip("| ")) for row in rows if len(row) == 3]
    table = [(row.layer, row.purpose) for row in LAYERS]
    start = written.index(table[0])
    assert written[start : start + len(table)] == table
