"""FSDP on XLA devices: version 2 by sharded tensors in one process (SPMD), version 1 by torch_xla's wrapper.

Source: https://docs.pytorch.org/xla/master/perf/spmd_basic.html, .../perf/fsdp.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.devices import row_axes, share_rows, use_mesh
from accelerate.nested import iterate_tensors
from accelerate.strategies.request import Context
from accelerate.strategies.xla.replicas import XlaReplicas
from accelerate.strategies.xla.units import find_units, policy_of, refuse_unknown


class XlaFullyShard(XlaReplicas):
    """One process drives all devices of its machine: parameters and batches lie in parts on them, and XLA's
    compiler decides when parts are brought together.

    The model stays the user's own object, with the names it has.
    """

    def __init__(self, context: Context) -> None:
        refuse_unknown(context.request.fsdp)
        self.mesh = use_mesh()
        super().__init__(context)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the very model, with its parameters in parts on all devices."""
        plugin = self.context.request.fsdp
        sharding = import_module("torch_xla.distributed.spmd").xla_sharding
        units = find_units(model, policy_of(plugin, model))
        if plugin.activation_checkpointing:  # type: ignore[union-attr]  # chosen because of it
            for unit in units[:-1]:
                import_module("torch_xla.distributed.fsdp").checkpoint_module(unit)
        for parameter in model.parameters():
            if parameter.ndim:
                sharding.mark_sharding(parameter, self.mesh, _along_longest(parameter))
        for unit in units:
            sharding.apply_backward_optimization_barrier(unit)
            unit.register_forward_hook(self._share_output)
        return self.compile(model)

    def _share_output(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        """Let each device compute its rows."""
        for tensor in iterate_tensors(output):
            if tensor.device.type == "xla":
                share_rows(tensor, self.mesh)


def _along_longest(parameter: torch.Tensor) -> tuple[str | None, ...]:
    longest = max(range(parameter.ndim), key=lambda axis: parameter.shape[axis])
    return tuple(row_axes if axis == longest else None for axis in range(parameter.ndim))


class XlaFullySharded(XlaReplicas):
    """Each process keeps a part of every parameter, by torch_xla's `XlaFullyShardedDataParallel`."""

    averages_itself: ClassVar[bool] = True
    holds_whole_models = False

    def __init__(self, context: Context) -> None:
        refuse_unknown(context.request.fsdp)
        super().__init__(context)
        self._wrapped: WeakSet[Any] = WeakSet()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the wrapped model; optimizers step its parts."""
        plugin: Any = self.context.request.fsdp
        package = import_module("torch_xla.distributed.fsdp")
        kind = package.XlaFullyShardedDataParallel
        before = dict(model.named_parameters())
        arguments: dict[str, Any] = {
            "reshard_after_forward": plugin.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
            "compute_dtype": torch.bfloat16 if self.context.mixed_precision == "bf16" else None,
        }
        policy = policy_of(plugin, model)
        if policy is not None:
            arguments["auto_wrap_policy"] = policy
        if plugin.activation_checkpointing:
            arguments["auto_wrapper_callable"] = lambda unit, *args, **kwargs: kind(
                package.checkpoint_module(unit), *args, **kwargs
            )
        wrapped: nn.Module = kind(model, **arguments)
        parts = dict(_parts_by_name(wrapped, kind))
        self.follow((old, parts[name]) for name, old in before.items() if name in parts)
        self._wrapped.add(wrapped)
        return self.compile(wrapped)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients, which lie in parts, so that their joint norm is at most `max_norm`."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in listed}
        for model in self._wrapped:
            if wanted & {id(parameter) for parameter in model.parameters()}:
                norm: torch.Tensor = model.clip_grad_norm_(max_norm, norm_type)
                return norm
        return super().clip_grad_norm(listed, max_norm, norm_type)

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Refuse: no process has more than parts."""
        raise _cannot_save()

    def load_weights(
        self, model: nn.Module, state: Mapping[str, Any], fill: Callable[[nn.Module, Mapping[str, Any]], None]
    ) -> None:
        """Refuse: no process has more than parts."""
        raise _cannot_save()

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        """Refuse: no process has more than parts."""
        raise _cannot_save()


def _cannot_save() -> ConfigurationError:
    return ConfigurationError(
        "With fsdp_version=1 on XLA devices each process has parts of the model only, which this version "
        "neither saves nor loads. Set fsdp_version=2, whose states are whole; or save each process's "
        "`model.state_dict()` with `model.get_shard_metadata()` by torch_xla."
    )


def _parts_by_name(wrapped: nn.Module, kind: type) -> Iterator[tuple[str, nn.Parameter]]:
    """The parts of parameters by the names that these had in the user's module."""
    for path, module in wrapped.named_modules():
        if isinstance(module, kind):
            for part in module.sharded_params:  # type: ignore[attr-defined]  # of torch_xla's wrapper
                yield _plain(f"{path}.{part._orig_name}"), part


def _plain(name: str) -> str:
    """A name without the wrappers on its way."""
    return ".".join(
        each for each in name.split(".") if each and each not in ("_fsdp_wrapped_module", "_fpw_module")
    )
