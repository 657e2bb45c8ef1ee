"""Tensor parallelism, in which the weights of layers are sharded over the ranks of an axis.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from accelerate.base import PreparationError, listed, wrong_value
from accelerate.logging import get_logger
from accelerate.parallelism_config import MeshAxis
from accelerate.planning import Layout
from accelerate.strategies.axes.whole_gradients import WholeGradients
from accelerate.strategies.dtensors import ParameterRemapper, named_parameters
from accelerate.strategies.layer import Layer
from accelerate.strategies.session import Bundle, Kind
from accelerate.strategies.tolerances import CHECK_REPLICAS
from accelerate.weights import find_tied_parameters, retie_parameters

logger = get_logger(__name__)

AXIS = MeshAxis.TP.value
REPLICATED = "replicate"
"""Style of modules that are replicated on each rank."""
SHARDED_IN_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "embedding_rowwise")
"""Styles that shard the first dimension of a weight. Only modules of these styles may be tied."""
BASE, ORIGINAL = "base_layer", "original_module"
"""Names by which the layers of peft have the layer that they adapt or copy."""


class TensorAxis(Layer):
    """Axis along which the weights of layers are sharded."""

    def __init__(self, strategy: Any) -> None:
        self._mesh, self._session = strategy.context.mesh, strategy.session
        self._context = strategy.context
        self._gradients: WholeGradients | None = None
        self._in_stages = strategy.context.request.parallelism.pp_enabled

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        """Replaces the parameters in the plan of a trained model by DTensors before it is split into stages.

        Without a pipeline the strategy does this when it shards or places the model.
        """
        for model in bundle.new(Kind.MODEL) if self._in_stages else ():
            if any(parameter.requires_grad for parameter in model.parameters()):
                self._shard(model)
        yield

    def _shard(self, model: nn.Module) -> None:
        remapper = ParameterRemapper(model, [*self._session.waiting, *self._session.prepared.optimizers])
        shard_layers(model, self._mesh)
        parameters = named_parameters(model)
        remapper.rejoin(parameters)
        self._session.replace(remapper.replaced(parameters))

    def finish_model(self, model: nn.Module, wrapped: nn.Module) -> None:
        if self._gradients is None and self._context.gradients.plugin_kwargs.get(CHECK_REPLICAS, True):
            self._gradients = WholeGradients(self._mesh.get_group(AXIS), self._context.device)

    def backward_done(self) -> None:
        if self._gradients is not None:
            self._gradients.compare(self._session.prepared.models)

    def release(self) -> None:
        if self._gradients is not None:
            self._gradients.end()
            self._gradients = None

    def memory_layout(self, layout: Layout) -> Layout:
        size = self._mesh[AXIS].size()
        return replace(layout, shards=layout.shards // size, tensor_parallel=size)


def shard_layers(model: nn.Module, mesh: Any, experts: Collection[nn.Module] = ()) -> None:
    """Shards the layers in the plan of a model in place, over the axis "tp" of a mesh.

    A model that is sharded already is not changed, nor is any model if the mesh is None or has no such axis.

    Args:
        experts: Modules that expert parallelism shards instead.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    has_axis = mesh is not None and AXIS in mesh.mesh_dim_names and mesh[AXIS].size() > 1
    if not has_axis or any(isinstance(p, DTensor) for p in model.parameters()):
        return
    tied, plan = find_tied_parameters(model), plan_of(model, experts)
    check_divisible(model, plan, mesh[AXIS].size())
    parallelize_module(model, mesh[AXIS], plan)
    retie_parameters(model, tied)


def _styles() -> dict[str, Callable[[], Any]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    gathered_output = partial(ColwiseParallel, output_layouts=Replicate())
    replicated_input = partial(RowwiseParallel, input_layouts=Replicate())
    return {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        **dict.fromkeys(("colwise_rep", "colwise_gather_output", "embedding_colwise"), gathered_output),
        **dict.fromkeys(("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), replicated_input),
        "sequence_parallel": SequenceParallel,
        # Shards the heads of [batch, sequence, heads, features].
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }


def plan_of(model: nn.Module, experts: Collection[nn.Module] = ()) -> dict[str, Any]:
    """Returns the names of the modules of a model to shard, with torch's style for each.

    The plan of a model, `tp_plan`, has patterns of module names, in which `*` matches one component, and a
    style for each, which is "colwise", "rowwise" or a variant of them, or a `ParallelStyle` of torch. Modules
    that are tied to one outside of the plan are replicated instead, which gives the same results.

    Args:
        experts: Modules that the plan does not shard, nor the modules inside them.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = type(model).__name__
    if plan and not isinstance(plan, Mapping):
        raise PreparationError(
            f"The tp_plan of {kind} is a {type(plan).__name__}: write patterns of module names with a style "
            "for each, such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
        )
    if not plan:
        raise PreparationError(
            f"{kind} has no plan of how its layers are sharded over the ranks. Give it a plan before "
            "`prepare`, such as model.tp_plan = {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or "
            "set tp_size=1."
        )
    if prefix := _prefix_of_base(model):
        plan = {f"{prefix}.{pattern}": style for pattern, style in plan.items()}
    skipped = {module for each in experts for module in each.modules()}
    names = [name for name, module in model.named_modules() if module not in skipped]
    patterns = {pattern: style for pattern, style in plan.items() if style != REPLICATED}
    matched = {name: style for pattern, style in patterns.items() for name in names if matches(name, pattern)}
    if not matched:
        raise PreparationError(
            f"The tp_plan of {kind} fits none of its modules: {listed(list(plan))}. Write patterns of their "
            f"names, such as {listed([name for name in names if name][:3])}."
        )
    for name, style in matched.items():
        if style in ("colwise", "rowwise") and isinstance(model.get_submodule(name), nn.Embedding):
            matched[name] = f"embedding_{style}"  # its inputs and outputs are whole
    tied = _tied_outside(model, matched)
    if tied:
        logger.info(
            f"{listed(tied)} share parameters with modules outside of the tp_plan and are replicated."
        )
    sharded = dict(
        part
        for name, style in matched.items()
        if name not in tied
        for part in _parts_of(model.get_submodule(name), name, style)
    )
    styles = _styles()
    for name, style in sharded.items():
        if isinstance(style, str) and style not in styles:
            raise PreparationError(
                f"The tp_plan of {kind} has {style!r} for {name}: the styles by name are "
                f"{', '.join(styles)}. Use one of them, or a torch.distributed.tensor.parallel.ParallelStyle."
            )
    return {name: styles[style]() if isinstance(style, str) else style for name, style in sharded.items()}


def check_divisible(model: nn.Module, plan: Mapping[str, Any], size: int) -> None:
    """Raises an error for attention heads or weights that cannot be divided by a number of ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    kind = type(model).__name__
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    fix = "Use a tp_size that divides it, or leave the layer out of the tp_plan"
    projections = {name.rpartition(".")[2] for name in plan}
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size and projections & {"k_proj", "v_proj", "qkv_proj"}:
            raise wrong_value("tp_size", size, f"{kind} has {name}={count}, and ranks have whole heads", fix)
    for name, style in plan.items():
        module = model.get_submodule(name)
        dim = {ColwiseParallel: 0, RowwiseParallel: 1}.get(type(style))
        if isinstance(module, nn.Linear) and dim is not None and module.weight.shape[dim] % size:
            if dim == 0 and style.output_layouts[0].is_replicate():  # such as a head, which is gathered
                continue
            reason = f"{name} of {kind} has a weight of shape {list(module.weight.shape)}"
            raise wrong_value("tp_size", size, f"{reason}, whose dimension {dim} is sharded", fix)


def _prefix_of_base(model: nn.Module) -> str:
    """Returns the name of the model in a model of peft, whose plan has no such prefix, or an empty name."""
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "peft_config") else model
    return next((name for name, module in model.named_modules() if module is base), "")


def _parts_of(module: nn.Module, name: str, style: Any) -> Iterator[tuple[str, Any]]:
    """Yields the modules to shard in a module of a plan, which is one itself unless it has an adapter.

    The weight of a LoRA adapter that has the sharded dimension of the layer is sharded like it, and so are
    the copies that peft trains.
    """
    parts = dict(module.named_children())
    if ORIGINAL in parts and "modules_to_save" in parts:
        yield f"{name}.{ORIGINAL}", style
        yield from (
            (f"{name}.modules_to_save.{key}", style) for key, _ in parts["modules_to_save"].named_children()
        )
        return
    if BASE not in parts:
        yield name, style
        return
    adapter = {"colwise": "lora_B", "rowwise": "lora_A"}.get(str(style).partition("_")[0], "")
    yield f"{name}.{BASE}", style
    for key in getattr(module, adapter, ()):
        yield f"{name}.{adapter}.{key}", style
    known = (BASE, "lora_A", "lora_B")
    others = [key for key, _ in module.named_parameters() if key.partition(".")[0] not in known]
    if others or not adapter:
        raise PreparationError(
            f"{name} has an adapter that cannot be sharded with style {style!r}: {listed(others or [name])}. "
            "Use LoRA without DoRA on linear layers, leave the layer out of the tp_plan, or set tp_size=1."
        )


def matches(name: str, pattern: str) -> bool:
    """Returns whether a pattern of a plan, in which `*` matches one component, fits the name of a module."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _tied_outside(model: nn.Module, matched: Mapping[str, Any]) -> list[str]:
    """Returns the matched modules that are tied to a module that cannot be sharded in the same way."""
    replicated: set[str] = set()
    for names in find_tied_parameters(model):
        owners = {
            name.rpartition(".")[0].removesuffix(f".{BASE}").removesuffix(f".{ORIGINAL}") for name in names
        }
        # All owners of a tied parameter have to be sharded in the same way, along their rows.
        if any(matched.get(owner) not in SHARDED_IN_ROWS for owner in owners):
            replicated |= owners
    return [name for name in matched if name in replicated]
