"""Activation checkpointing of the blocks of a model, with all strategies that torch applies.

The layer `Recomputation` calls `apply_activation_checkpointing` for each model. Strategies that shard a model
call `recompute` of `recomputed_blocks.py` for their units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerate import planning
from accelerate.base import (
    AccelerateError,
    ConfigurationError,
    convert_bytes,
    convert_file_size_to_int,
    wrong_value,
)
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors, recursively_apply
from accelerate.ops import current_transport, is_dtensor
from accelerate.planning import Policy
from accelerate.plugins import ActivationCheckpointing
from accelerate.precision import MixedPrecision
from accelerate.strategies.layer import Layer, WeakStrategy
from accelerate.strategies.recomputed_blocks import (
    apply_policy,
    find_blocks,
    keep_activations,
    recompute_in_trace,
)
from accelerate.strategies.request import Context

if TYPE_CHECKING:
    from accelerate.strategies.base import Strategy

logger = get_logger(__name__)

Choice = tuple[int, list[Policy], float]
"""Index of a policy, all policies, and the smallest bytes of the policies that were tried."""


# Choice by a budget


def traced_precision(context: Context) -> MixedPrecision | None:
    """Returns the mixed precision of layouts that cast parameters once, or None in full precision."""
    name = context.mixed_precision
    if name not in ("no", "fp16", "bf16"):
        reason = "layers of FP8 libraries cannot be traced"
        fix = "Plan with mixed_precision='bf16', which needs about as much memory"
        raise wrong_value("mixed_precision", name, reason, fix)
    return None if name == "no" else MixedPrecision(name, context.device.type, context.request.autocast)


def tracer_for(
    strategy: Strategy, step: planning.Step, policy: Policy
) -> Callable[[planning.Variant], planning.Trace]:
    """Returns a function that traces a step, whose variants with checkpointing recompute by a policy."""
    from accelerate.strategies.axes import list_experts, trace_share  # imports torch.distributed.tensor

    parallelism = strategy.context.request.parallelism
    handler = parallelism.ep_handler if parallelism is not None else None
    is_experts = handler.is_experts if handler is not None else None

    def apply(model: nn.Module, blocks: Sequence[nn.Module], offloads: bool) -> None:
        if policy is not None:
            blocks = find_blocks(model, policy.blocks)
            blocks = blocks[:: policy.every]
        operators = policy and policy.save_operators
        recompute_in_trace(model, blocks, offloads, operators, parallelism)

    return planning.tracer_of(
        replace(step, find_experts=partial(list_experts, is_experts=is_experts)),
        strategy.precision,
        traced_precision(strategy.context),
        apply,
        share_experts=trace_share,
        extrapolates=policy is None or policy.every == 1,
    )


def choose_for_step(strategy: Strategy, step: planning.Step, request: ActivationCheckpointing) -> Choice:
    """Returns the index of the policy that a budget allows for a step, all policies, and the smallest bytes.

    The index is the number of policies if none fits.
    """
    names: Any = request.blocks
    assert request.budget is not None
    policies = planning.policies_for(len(find_blocks(step.model, names)), names)
    layout = strategy.memory_layout()
    size = planning.batch_size_of(step.batch)

    def bytes_of(policy: Policy) -> float:
        trace = tracer_for(strategy, step, policy)
        variant = planning.Variant(size, policy is not None, layout.is_sharded, False, layout.expert_parallel)
        return max(moment.activations for moment in trace(variant).forward_backward)

    index, smallest = planning.choose_policy(policies, bytes_of, convert_file_size_to_int(request.budget))
    return index, policies, smallest


def chosen_policy(
    index: int, policies: Sequence[Policy], smallest: float, request: ActivationCheckpointing, name: str
) -> Policy:
    """Returns the policy of an index, or raises an error if no policy fits in the budget."""
    if index < len(policies):
        return policies[index]
    raise wrong_value(
        "budget",
        request.budget,
        f"the activations of {name} need at least {convert_bytes(smallest)} for this batch",
        f"Give {round(smallest)} bytes or more, or use a smaller batch",
    )


class BudgetedForward:
    """Hook before the forward of a prepared model that chooses its policy for the first training batch.

    Afterwards it warns about a larger batch. It is not copied with the model.

    Args:
        model: Model of the user, before it is prepared.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.strategy, self.model, self.blocks = strategy, model, blocks
        self.request = strategy.context.request.activations
        self.copy: nn.Module | None = planning.meta_copy(model)
        self.name, self.num_elements = type(model).__name__, 0
        self.handle: Any = None

    def attach(self, prepared: nn.Module) -> None:
        """Registers the hook on a prepared model, so that it runs before those of wrappers."""
        self.handle = prepared.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        return partial, (_skip,)  # copies of a prepared model have a hook without effect

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        num_elements = sum(tensor.numel() for tensor in iterate_tensors((args, dict(kwargs))))
        if self.copy is not None:
            self._choose(args, kwargs)
            self.copy, self.num_elements = None, num_elements
        elif num_elements > self.num_elements:
            logger.warning(
                f"A batch of {self.name} has {num_elements} elements, and activation "
                f"checkpointing was chosen for {self.num_elements}: its activations may need more than "
                f"budget={self.request.budget}. Train on the largest batch first."  # type: ignore[union-attr]
            )
            self.handle.remove()

    def _choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert self.copy is not None
        assert self.request is not None
        device = self.strategy.context.device
        step = planning.Step(
            self.copy.train(),
            [],
            recursively_apply(_cut, (args, dict(kwargs))),
            planning.loss_or_sum,
            device,
            max_norm=None,
            keeps_output=True,
        )
        index, policies, smallest = _agree(
            self.strategy, partial(choose_for_step, self.strategy, step, self.request)
        )
        policy = chosen_policy(index, policies, smallest, self.request, self.name)
        recomputed = "nothing" if policy is None else policy.summary
        logger.info(f"Activation checkpointing of {self.name} recomputes {recomputed}.")
        if policy is not None:
            # A comparison of outputs may exceed the budget.
            apply_policy(policy, self.model, self.blocks, self.strategy.context, compares_outputs=False)


def _cut(tensor: Tensor) -> Tensor:
    """Returns a leaf that has a gradient if the tensor has one, as a trace ends at its inputs."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _agree(strategy: Strategy, choose: Callable[[], Choice]) -> Choice:
    """Returns the choice of this rank, or that of the strictest rank if ranks exchange shards in backward.

    An error of one of these ranks is raised on all of them.
    """
    if strategy.holds_whole_models:
        return choose()
    outcome: Choice | AccelerateError
    try:
        outcome = choose()
    except AccelerateError as error:
        outcome = error
    outcomes = current_transport().gather_object(outcome)
    if failures := [each for each in outcomes if isinstance(each, AccelerateError)]:
        raise failures[0]
    strictest: Choice = max(outcomes, key=lambda choice: (choice[0], choice[2]))
    return strictest


def _skip(*args: Any) -> None:
    return None


# Preparation


class Recomputation(Layer):
    """Activation checkpointing of the blocks of trained models."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = WeakStrategy(strategy)
        self._budgeted: dict[nn.Module, BudgetedForward] = {}  # models that are not wrapped yet

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        hook = apply_activation_checkpointing(self._strategy(), model)
        if hook is not None:
            self._budgeted[model] = hook
        return model

    def finish_model(self, model: nn.Module, wrapped: nn.Module) -> None:
        hook = self._budgeted.pop(model, None)
        if hook is not None:
            hook.attach(wrapped)


def apply_activation_checkpointing(strategy: Strategy, model: nn.Module) -> BudgetedForward | None:
    """Applies the activation checkpointing of the run to a model that is not prepared, in place.

    Returns:
        The hook to register on the prepared model if its first batch decides, or None.
    """
    request = strategy.context.request.activations
    if request is None or not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigurationError(
            f"{type(model).__name__} already recomputes its layers by gradient_checkpointing_enable(), and "
            "ActivationCheckpointing would recompute them twice. Use one of them."
        )
    blocks = find_blocks(keep_activations(model), request.blocks)
    if not blocks:
        logger.warning(
            f"ActivationCheckpointing has no effect on {type(model).__name__}: it has no lists of modules. "
            "Pass the class names of its layers as blocks=[...]."
        )
        return None
    if request.budget is None:
        apply_policy(request, model, blocks, strategy.context)
        return None
    _check_budget(strategy, model, request)
    return BudgetedForward(strategy, model, blocks)


def _check_budget(strategy: Strategy, model: nn.Module, request: ActivationCheckpointing) -> None:
    """Raises an error for a run whose activations no plan computes."""
    traced_precision(strategy.context)
    strategy.memory_layout()
    mesh = strategy.context.request.parallelism
    is_split = mesh is not None and (mesh.non_data_parallel_size > 1 or mesh.ep_enabled)
    if is_split or any(map(is_dtensor, model.parameters())):
        reason = "the activations of a model whose layers or batches are split over ranks are not traced"
        fix = "Pass every=... or save_operators='matmul' instead"
        raise wrong_value("budget", request.budget, reason, fix)
