"""Weights of a model of peft with its adapters merged, computed one layer at a time.

`weight_stream` reads the plan. The names are those of the model without adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from accelerate.base import ConfigurationError, wrong_value
from accelerate.strategies.dtensors import fsdp2_canonicalize_names

_LAYERS = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")
"""Classes of LoRA layers in peft that are merged."""


Merged = tuple[str, tuple[str, ...], Callable[[Mapping[str, Tensor]], Tensor] | None]
"""Name of a tensor, the names of the weights from which it is computed, and the function that computes it."""


class Update(NamedTuple):
    """Change of a weight or of a bias by one adapter of a layer.

    Attributes:
        layer: The LoRA layer.
        inputs: Names of the weights of the adapter: A and B, or the bias of B.
    """

    layer: Any
    adapter: str
    inputs: tuple[str, ...]


def plan(model: nn.Module, weights: Mapping[str, Any], first: Mapping[str, str]) -> list[Merged]:
    """Returns the tensors of a model after its active adapters are merged.

    Args:
        model: Model without wrappers, whose weights may be sharded or on other ranks.
        weights: Weights of the model by name.
        first: First name of the weight of each name.

    Raises:
        ConfigurationError: The model has no adapters, or some that cannot be merged.
    """
    modules = fsdp2_canonicalize_names(dict(model.named_modules(remove_duplicate=False)))
    layers = find_layers(modules)
    names = fsdp2_canonicalize_names({name: name for name in weights})
    updates: dict[str, list[Update]] = {}
    for path, layer in layers.items():
        for base, update in _updates_of(path, layer):
            inputs = tuple(first[names[name]] for name in update.inputs)
            updates.setdefault(first[names[base]], []).append(update._replace(inputs=inputs))
    items: dict[str, Merged] = {}  # by the first name of the weight
    for name, original in names.items():
        weight, merged_name = first[original], _merged_name(name, modules)
        if merged_name is None or weight in items:
            continue
        changes = updates.get(weight, [])
        inputs = (weight, *(each for update in changes for each in update.inputs))
        compute = partial(_merge, weight, changes) if changes else None
        items[weight] = merged_name, inputs, compute
    return list(items.values())


def find_layers(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Returns the layers of a model with adapters by name, all of which can be merged."""
    if "peft" not in sys.modules:
        raise _no_adapters()
    from peft import PeftModel
    from peft.tuners.lora import layer as lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    kinds = tuple(getattr(lora, name) for name in _LAYERS if hasattr(lora, name))
    layers: dict[str, Any] = {}
    has_adapters = False
    for name, module in modules.items():
        if isinstance(module, PeftModel) and module.active_peft_config.is_prompt_learning:
            raise _cannot_merge(name, module.active_peft_config.peft_type, "learned prompts are not weights")
        if isinstance(module, BaseTunerLayer):
            if type(module) not in kinds:
                reason = f"only {', '.join(_LAYERS)} of LoRA are merged"
                raise _cannot_merge(name, f"{type(module).__module__}.{type(module).__qualname__}", reason)
            layers[name] = module
        is_wrapper = isinstance(module, AuxiliaryTrainingWrapper)
        if is_wrapper and not isinstance(module, ModulesToSaveWrapper):
            raise _cannot_merge(name, type(module).__name__, "only modules_to_save are merged")
        has_adapters |= isinstance(module, BaseTunerLayer) or is_wrapper
    if not has_adapters:
        raise _no_adapters()
    return layers


def _updates_of(path: str, layer: Any) -> Iterator[tuple[str, Update]]:
    """Yields the name of each weight of a layer that its adapters change, and the change."""
    is_embedding = not len(layer.lora_A)
    own = layer.lora_embedding_A if is_embedding else layer.lora_A
    kinds = (
        ("lora_embedding_A.{}", "lora_embedding_B.{}")
        if is_embedding
        else ("lora_A.{}.weight", "lora_B.{}.weight")
    )
    base = layer.get_base_layer()
    for adapter in layer.active_adapters:
        if adapter not in own or adapter in layer.merged_adapters:
            continue
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None or getattr(layer, "use_dora", {}).get(adapter):
            kind = "DoRA" if variant is None else type(variant).__name__
            raise _cannot_merge(path, kind, "only plain LoRA is merged")
        if getattr(base, "groups", 1) > 1:
            raise _cannot_merge(path, f"groups={base.groups}", "peft merges no grouped convolutions")
        inputs = tuple(f"{path}.{kind.format(adapter)}" for kind in kinds)
        yield f"{path}.base_layer.weight", Update(layer, adapter, inputs)
        if getattr(layer, "lora_bias", {}).get(adapter):
            bias = f"{path}.lora_B.{adapter}.bias"
            yield f"{path}.base_layer.bias", Update(layer, adapter, (bias,))


def _merged_name(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Returns the name of a weight in the merged model, or None if the model does not have it."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    parts, kept, depth = name.split("."), [], 0
    while depth < len(parts):
        module, rest = modules[".".join(parts[:depth])], parts[depth:]
        if isinstance(module, PeftModel):
            skipped = ["base_model"]
        elif isinstance(module, BaseTuner):
            skipped = ["model"]
        elif isinstance(module, BaseTunerLayer):
            skipped = ["base_layer"]
        elif isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters
            skipped = ["modules_to_save", active[0]] if active else ["original_module"]
        else:
            kept.append(rest[0])
            depth += 1
            continue
        if rest[: len(skipped)] != skipped:
            return None
        depth += len(skipped)
    return ".".join(kept)


def _merge(weight: str, updates: list[Update], tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns a whole weight or bias with the changes of its adapters."""
    merged = tensors[weight]
    for layer, adapter, inputs in updates:
        parts = [tensors[name].to(merged.device) for name in inputs]
        if len(parts) == 1:
            change = parts[0] * layer.scaling[adapter]
        else:
            change = type(layer).get_delta_weight(_WholeLayer(layer, adapter, merged, *parts), adapter)
        is_same = change.dtype == merged.dtype
        merged = change.add_(merged) if is_same else (merged + change).to(merged.dtype)
    return merged


class _WholeLayer:
    """LoRA layer with whole tensors, from which peft computes the change of its weight."""

    def __init__(self, layer: Any, adapter: str, weight: Tensor, a: Tensor, b: Tensor) -> None:
        self._layer = layer
        self._base = SimpleNamespace(weight=weight, groups=1)
        self.lora_A, self.lora_B = ({adapter: SimpleNamespace(weight=part)} for part in (a, b))
        self.lora_embedding_A, self.lora_embedding_B = {adapter: a}, {adapter: b}

    def get_base_layer(self) -> Any:
        return self._base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _no_adapters() -> ConfigurationError:
    return wrong_value("merge_adapters", True, "the model has no adapters of peft", "leave it out")


def _cannot_merge(name: str, kind: object, reason: str) -> ConfigurationError:
    module = f"{name or 'the model'} has {kind}, and {reason}"
    fix = "leave it out, which streams the adapters, or merge a copy of the model by merge_and_unload"
    return wrong_value("merge_adapters", True, module, fix)
