"""Forwards of experts that send tokens to the ranks of their experts, and receive the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard


class DispatchedForward:
    """Callable that runs a module of experts on the tokens of all ranks that chose its experts.

    It is the instance attribute `forward` of the module. Called on all ranks of the axis, also without
    tokens.

    Args:
        module: Module whose parameters are sharded over the axis.
        num_experts: Number of experts on all ranks.
        mesh: Mesh of the axis.
        copies: Mesh of the ranks with the same tokens as this rank, or None.
        scale: Factor of the gradients of the parameters.
    """

    def __init__(self, module: nn.Module, num_experts: int, mesh: Any, copies: Any, scale: float) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        self.num_experts, self.mesh, self.copies, self.scale = num_experts, mesh, copies, scale

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Forward of the experts of this rank, for `inspect.signature`."""
        return self.inner or type(self.module).forward.__get__(self.module)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gathers the experts of the module and restores its forward inside the block."""
        module: Any = self.module
        num_local = getattr(module, "num_experts", None)
        with torch.no_grad(), _replaced_parameters(module, DTensor.full_tensor):
            module.__dict__["forward"] = self.__wrapped__
            if num_local is not None:
                module.num_experts = self.num_experts
            try:
                yield
            finally:
                module.__dict__["forward"] = self
                if num_local is not None:
                    module.num_experts = num_local

    # The host reads the number of rows, which differs in each batch.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not any(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            return self._run_on_fakes(*args, **kwargs)
        if len(args) != 3:
            args = inspect.signature(self.__wrapped__).bind(*args, **kwargs).args
        return self._run_dispatched(*args)

    def _run_dispatched(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Returns the sum of the weighted outputs of the chosen experts for each token."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        choices = indices.reshape(-1, indices.shape[-1]), weights.reshape(-1, weights.shape[-1])
        # FSDP warns about outputs that are views.
        if self.copies is None:
            outputs = self._dispatch(tokens, *choices)
            return outputs.view(*hidden.shape[:-1], *outputs.shape[1:]).sum(-2)
        shards = [_scatter(tensor, self.copies) for tensor in (tokens, *choices)]
        whole = _gather(self._dispatch(*shards).sum(1), self.copies, len(tokens))
        return whole.reshape(*hidden.shape[:-1], -1).clone()

    def _run_on_fakes(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the module in a trace, in which it has fake weights of all experts."""
        with self.whole():
            return self.__wrapped__(*args, **kwargs)  # type: ignore[no-any-return]

    def _dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted outputs of the chosen experts for the tokens of this rank."""
        num_choices, chosen = indices.shape[-1], indices.reshape(-1)
        order = torch.argsort(chosen, stable=True)  # by rank, and by expert for each rank
        local, lengths, group = self._route(chosen)
        rows = exchange(tokens[order // num_choices], lengths, group)
        row_weights = exchange(weights.reshape(-1, 1)[order], lengths, group)
        outputs = exchange(self._run(rows, local.unsqueeze(1), row_weights), lengths[::-1], group)
        return outputs[torch.argsort(order)].view(len(tokens), num_choices, outputs.shape[-1])

    def _route(self, chosen: Tensor) -> tuple[Tensor, list[list[int]], Any]:
        """Returns where the rows of the chosen experts go.

        Returns:
            The expert of each row that this rank receives, counted from its first one, the numbers of rows
            that it sends to each rank and receives from each, and the process group.
        """
        group, size = self.mesh.get_group(), self.mesh.size()
        num_local = self.num_experts // size
        sent = torch.bincount(chosen, minlength=self.num_experts).view(size, num_local)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        lengths = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        local = torch.arange(num_local, device=received.device).repeat(size)
        return local.repeat_interleave(received.reshape(-1), output_size=sum(lengths[1])), lengths, group

    def _run(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted outputs of the experts of this rank, each for one row."""
        num_rows = len(rows)
        if not num_rows:  # a row of zeros, so that backward reaches parameters and the other ranks
            rows, experts, weights = (
                nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (rows, experts, weights)
            )
        with _replaced_parameters(self.module, self._to_local):
            output: Tensor = self.__wrapped__(rows, experts, weights)
        return output[:num_rows]

    def _to_local(self, parameter: DTensor) -> Tensor:
        """Returns the experts of this rank, with the factor of their gradients."""
        local: Tensor = parameter.to_local()
        return local if self.scale == 1.0 else _ScaledGradient.apply(local, self.scale)  # type: ignore[no-untyped-call]


class BalancedForward(DispatchedForward):
    """Forward of the experts of one rank in a trace, in which each expert gets equally many rows.

    The rank then receives as many rows as it sends, and the all-to-alls are copies.

    Args:
        module: Module of experts, with fake weights of the experts of one rank.
        num_local: Number of its experts.
    """

    def __init__(self, module: nn.Module, num_local: int) -> None:
        super().__init__(module, num_local, mesh=None, copies=None, scale=1.0)

    def _run_on_fakes(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        return self._run_dispatched(*bound.args)

    def _route(self, chosen: Tensor) -> tuple[Tensor, list[list[int]], Any]:
        num_rows = chosen.numel()
        local = torch.arange(self.num_experts, device=chosen.device)
        local = local.repeat_interleave(-(-num_rows // self.num_experts))[:num_rows].clone()
        return local, [[num_rows], [num_rows]], None


@contextmanager
def _replaced_parameters(module: nn.Module, replace: Callable[[DTensor], Tensor]) -> Iterator[None]:
    """Replaces the sharded parameters of a module by plain tensors inside the block."""
    kept: list[tuple[dict[str, Any], str, Any]] = [
        (owner._parameters, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    for parameters, name, parameter in kept:
        parameters[name] = replace(parameter)
    try:
        yield
    finally:
        for parameters, name, parameter in kept:
            parameters[name] = parameter


class _ScaledGradient(torch.autograd.Function):
    """Identity whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def exchange(rows: Tensor, lengths: list[list[int]], group: Any) -> Tensor:
    """Returns the rows that all ranks send to this rank, with gradients that are sent back.

    Called on all ranks of the group.

    Args:
        rows: Rows for each rank, in the order of the ranks.
        lengths: Numbers of rows that this rank sends to each rank, and that it receives from each.
        group: Process group, or None in a trace, in which the rows are copied.
    """
    return _Exchange.apply(rows, *lengths, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """All-to-all whose backward is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.lengths, ctx.group = (received, sent), group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sent, received = ctx.lengths
        return _all_to_all(gradients[0], sent, received, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    if group is None:  # in a trace
        return rows.contiguous().clone()
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


def _scatter(tensor: Tensor, mesh: Any) -> Tensor:
    """Returns this rank's rows of a tensor that all ranks of a mesh have."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _gather(rows: Tensor, mesh: Any, num_rows: int) -> Tensor:
    """Returns the rows of all ranks of a mesh."""
    shape = torch.Size((num_rows, *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()
