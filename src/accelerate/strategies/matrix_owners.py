"""Steps of optimizers that need whole matrices, such as Muon, SOAP and Shampoo, over shards and replicas.

Each parameter has one owner among the ranks. Before a step the owners receive the shards of their parameters
and gradients, then the optimizer steps them as on one process, and the other ranks receive the results. The
states of a parameter are on its owner only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.base import PreparationError, StateError
from accelerate.checkpointing import Box, LocalShards, box_of, to_local_shards
from accelerate.logging import get_logger
from accelerate.ops import current_transport, is_dtensor, is_on_any_rank, local_tensor
from accelerate.strategies.layer import Layer, WeakStrategy
from accelerate.strategies.matrix_plan import LocalBox, Matrix, by_dtype, plan_owners
from accelerate.strategies.session import WHOLE_MATRICES, needs_whole_matrices
from accelerate.strategies.state import Owners, owners_of
from accelerate.strategies.trial_steps import needs_all_parameters

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.strategies.base import Strategy

logger = get_logger(__name__)

_STEPPING_MARK = "_accelerate_is_stepping"  # attribute of an optimizer while its prepared one takes a step
_BY_PARAMETER = ("params", "param_names")  # entries of a group with one value for each parameter


def has_batches(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is torch's Muon and has batches of matrices, which it refuses to step."""
    return isinstance(optimizer, torch.optim.Muon) and any(
        p.ndim == 3 for group in optimizer.param_groups for p in group["params"]
    )


class MatrixOwners(Owners):
    """Ranks that own the matrices of one prepared optimizer.

    Args:
        optimizer: The optimizer. `param_groups` has the parameters of the model between steps.
        keys_of: Returns the keys of the parameters of each group, which are equal on all ranks.
        is_expected: Whether a program expects that `state_dict` on a rank has only the states of this rank,
            because it has requested whole matrices or shards the model.
        is_new_on_any_rank: Returns whether any rank has new parameters, from whether this rank has. None if
            all ranks have the same parameters.
    """

    def __init__(
        self,
        optimizer: AcceleratedOptimizer,
        keys_of: Callable[[Any], Sequence[Sequence[str]]],
        is_expected: bool,
        is_new_on_any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        self._optimizer = ref(optimizer)  # it has this object
        self._keys_of, self._is_new_on_any_rank = keys_of, is_new_on_any_rank
        self._trained: list[Tensor] = []
        self._parameters: dict[str, Tensor] = {}
        self._matrices: dict[str, Matrix] = {}
        self._owners = WeakIdKeyDictionary()  # also of parameters that are frozen now, whose states stay
        self._buckets: list[list[Matrix]] = []
        self._is_expected = is_expected
        optimizer.optimizer.register_step_pre_hook(partial(_refuse_other_steps, ref(optimizer)))

    @property
    def optimizer(self) -> AcceleratedOptimizer:
        """The optimizer, of which this is an observer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # Owners

    def plan(self) -> bool:
        """Chooses the owners of new parameters, and drops the states of parameters with other owners.

        Called on all ranks. Ranks with the same parameters communicate only if some were added, replaced or
        frozen.

        Returns:
            Whether there were new parameters.
        """
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        is_new = len(trained) != len(self._trained) or any(map(operator.is_not, trained, self._trained))
        if self._is_new_on_any_rank is not None:
            is_new = self._is_new_on_any_rank(is_new)
        if not is_new:
            return False
        names = self._keys_of(self.optimizer)
        pairs = [
            (key, parameter)
            for group, keys in zip(self.optimizer.param_groups, names, strict=True)
            if group.get(WHOLE_MATRICES) is not False and group.get("use_muon") is not False
            for key, parameter in zip(keys, group["params"], strict=True)
            if parameter.requires_grad or parameter.grad is not None  # of the backward before it was frozen
        ]
        transport = current_transport()
        boxes = {key: _box_of(key, parameter) for key, parameter in pairs}
        own = {key: self._owners[parameter] for key, parameter in pairs if parameter in self._owners}
        ranks = transport.gather_object((boxes, own))
        known = {key: owner for _, each in ranks for key, owner in each.items()}
        matrices = plan_owners([each for each, _ in ranks], known)
        self._matrices = {matrix.key: matrix for matrix in matrices}
        for key, parameter in pairs:
            self._owners[parameter] = self._matrices[key].owner
        self._buckets = by_dtype(self._matrices.values())
        self._parameters, self._trained = dict(pairs), trained
        self.after_load()
        return bool(pairs)

    def owners(self) -> list[int | None]:
        by_id = {id(p): self._matrices[key].owner for key, p in self._parameters.items()}
        return [by_id.get(id(parameter)) for parameter in self.optimizer.parameters()]

    def before_state_dict(self) -> None:
        """Logs a warning once that a state dict on this rank has the states of some matrices only."""
        if self._is_expected:
            return
        name, owners = type(self.optimizer.optimizer).__name__, self.owners()
        logger.warning_once(
            f"{name}.state_dict() has the states of {owners.count(current_transport().rank)} of "
            f"{len(owners) - owners.count(None)} matrices, those that this rank owns, and "
            f"{name}.load_state_dict() needs all of them. Save with accelerator.save_state(), or give each "
            f"rank all states: set whole_matrices=False in prepare(), or as an attribute of the optimizer."
        )

    def before_load(self, state_dict: Mapping[str, Any]) -> None:
        """Raises an error for a state dict that another rank has returned, without states for this one."""
        rank, owners = current_transport().rank, self.owners()
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        pairs = zip(keys, owners, strict=False)
        found = {owner for key, owner in pairs if owner is not None and key in state_dict["state"]}
        if rank in owners and found and rank not in found:
            name = type(self.optimizer.optimizer).__name__
            raise StateError(
                f"The state dict of {name} has states of matrices that ranks {sorted(found)} own, "
                f"and none of the {owners.count(rank)} that rank {rank} owns. {name}.state_dict() on a rank "
                "has the states of this rank. Save with accelerator.save_state(), save and load a file on "
                "each rank, or prepare the optimizer with whole_matrices=False."
            )

    def after_load(self) -> None:
        """Removes the states of parameters that other ranks own."""
        state, rank = self.optimizer.state, current_transport().rank
        for key, parameter in self._parameters.items():
            if self._matrices[key].owner != rank:
                state.pop(parameter, None)

    # Steps

    def step(self, take_step: Callable[[], Any], closure: object = None) -> Any:
        """Steps the matrices of this rank, and the parameters that are stepped in shards.

        Called on all ranks.

        Args:
            take_step: Step of the inner optimizer.
            closure: Not supported, because the model would use parameters that are not updated yet.
        """
        name = type(self.optimizer.optimizer).__name__
        if closure is not None:
            raise StateError(
                f"{name}.step() got a closure, which would compute with parameters that other ranks step. "
                "Call step() without it, or prepare the optimizer with whole_matrices=False."
            )
        if self.optimizer.is_joined:
            raise StateError(
                f"{name} steps whole matrices on the ranks that own them, which must take part in each step, "
                "and join_uneven_inputs() lets ranks stop early. Use even_batches or windows()."
            )
        self.plan()
        whole: dict[str, Tensor] = {}
        for bucket in self._buckets:
            self._receive(bucket, whole)
        try:
            with self._in_place_of_parameters(whole):
                result = take_step()
        except Exception:
            # Other ranks wait for the values, and replicas stay equal if the program catches the exception.
            self._send_all(whole)
            raise
        self._send_all(whole)
        return result

    @torch.no_grad()
    def _receive(self, bucket: Sequence[Matrix], whole: dict[str, Tensor]) -> None:
        """Adds the matrices of this rank, with their gradients, to `whole`."""
        rank, packets = current_transport().rank, _Packets()
        has_gradient: dict[str, list[Tensor]] = {}
        for matrix in bucket:
            key = matrix.key
            if matrix.owner != rank:
                if any(source == rank for source, _ in matrix.sources):
                    packets.send(matrix.owner, *_content(key, self._parameters[key]))
                continue
            parameter = self._parameters[key]
            if matrix.is_whole:
                whole[key] = _as_leaf(parameter)
                continue
            value, gradient = (
                torch.empty(matrix.shape, dtype=matrix.dtype, device=parameter.device) for _ in range(2)
            )
            whole[key], has_gradient[key] = _leaf(value, gradient), []
            for source, box in matrix.sources:
                targets = [box_of(value, *box), box_of(gradient, *box), value.new_empty(1)]
                has_gradient[key].append(targets[2])
                if source == rank:
                    for target, own in zip(targets, _content(key, parameter), strict=True):
                        target.copy_(own)
                else:
                    packets.receive(source, *targets)
        if not all(matrix.is_whole for matrix in bucket):
            packets.exchange(bucket[0].dtype)
        for key, flags in has_gradient.items():
            parameter = self._parameters[key]
            # A rank with an empty shard does not know whether the parameter has a gradient.
            if parameter.grad is None and not (local_tensor(parameter).numel() == 0 and bool(sum(flags))):
                whole[key].grad = None

    @contextmanager
    def _in_place_of_parameters(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        """Replaces the parameters of the inner optimizer by the matrices of this rank inside the block."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        splits = isinstance(self.optimizer.optimizer, torch.optim.Muon)
        stepped: dict[int, list[Tensor]] = {id(parameter): [] for parameter in self._parameters.values()}
        swaps = [(self._parameters[key], _matrices_of(leaf, splits)) for key, leaf in whole.items()]
        stepped.update((id(parameter), leaves) for parameter, leaves in swaps)
        before = [{name: group[name] for name in _BY_PARAMETER if name in group} for group in groups]
        setattr(self.optimizer.optimizer, _STEPPING_MARK, True)
        try:
            for group in groups:
                parts = [stepped.get(id(parameter), [parameter]) for parameter in group["params"]]
                if "param_names" in group:
                    pairs = zip(group["param_names"], parts, strict=True)
                    group["param_names"] = [name for name, own in pairs for _ in own]
                group["params"] = [leaf for own in parts for leaf in own]
            for parameter, leaves in swaps:
                _divide_state(state, parameter, leaves)
            yield
        finally:
            delattr(self.optimizer.optimizer, _STEPPING_MARK)
            for group, values in zip(groups, before, strict=True):
                group.update(values)
            for parameter, leaves in swaps:
                _join_state(state, parameter, leaves)

    def _send_all(self, whole: Mapping[str, Tensor]) -> None:
        for bucket in self._buckets:
            self._send(bucket, whole)

    @torch.no_grad()
    def _send(self, bucket: Sequence[Matrix], whole: Mapping[str, Tensor]) -> None:
        """Updates the parameters of all ranks to the values of the owners."""
        rank, packets = current_transport().rank, _Packets()
        for matrix in bucket:
            if matrix.owner == rank:
                updated = whole[matrix.key].detach()
                for target, box in matrix.copies:
                    packets.send(target, box_of(updated, *box))
                for source, box in matrix.sources:
                    if source == rank:
                        _copy(updated, box, local_tensor(self._parameters[matrix.key]))
            elif any(target == rank for target, _ in matrix.copies):
                packets.receive(matrix.owner, local_tensor(self._parameters[matrix.key]))
        if any(matrix.copies for matrix in bucket):
            packets.exchange(bucket[0].dtype)


def _refuse_other_steps(
    prepared: ref[AcceleratedOptimizer], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """Raises an error if a program calls `step` of the optimizer that it has passed to `prepare`."""
    if prepared() is not None and not hasattr(optimizer, _STEPPING_MARK):
        raise StateError(
            f"{type(optimizer).__name__}.step() was called on the optimizer that was passed to prepare, so "
            "each rank would step parameters whose states are on other ranks. Call step() of the optimizer "
            "that prepare() returned."
        )


class WholeMatrices(Layer):
    """Optimizers whose ranks step some parameters each as a whole."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = WeakStrategy(strategy)

    def wrap_optimizer(self, optimizer: AcceleratedOptimizer, whole_matrices: bool | None) -> None:
        """Lets each rank step some parameters of an optimizer as a whole, if the optimizer needs that."""
        strategy = self._strategy()
        needed = needs_whole_matrices(optimizer.optimizer) if whole_matrices is None else whole_matrices
        is_plain = strategy.context.topology.size == 1 and not has_batches(optimizer.optimizer)
        if not needed or is_plain or owners_of(optimizer) is not None:
            return
        if needs_all_parameters(optimizer.optimizer):
            raise PreparationError(
                f"{type(optimizer.optimizer).__name__} updates a parameter depending on the others, such as "
                "on the norm of all gradients, and each rank would step only the whole matrices that it "
                "owns. Pass whole_matrices=False to prepare()."
            )
        if strategy.has_plain_weights and not strategy.flattens_parameters:
            is_expected = whole_matrices is True or not strategy.holds_whole_models
            keys_of = partial(_keys_of, self._strategy)
            is_divided = any(layer.divides_models for layer in strategy.layers)
            is_new = partial(is_on_any_rank, device=strategy.context.device) if is_divided else None
            owners = MatrixOwners(optimizer, keys_of, is_expected, is_new)
            optimizer.observers = (*optimizer.observers, owners)
            optimizer.step_wrappers = (*optimizer.step_wrappers, owners.step)
        elif whole_matrices or strategy.flattens_parameters:
            raise PreparationError(
                f"{type(optimizer.optimizer).__name__} needs whole matrices, and {type(strategy).__name__} "
                "changes the layout of parameters. Use DistributedDataParallel, FSDP 2 (fsdp_version=2) or "
                "parallelism_config. Pass whole_matrices=False to prepare() if it works on parts of them."
            )

    def follow_parameters(self) -> None:
        """Chooses the ranks that own the matrices of all optimizers, and prints their number once."""
        strategy = self._strategy()
        optimizers, topology = strategy.session.prepared.optimizers, strategy.context.topology
        owners = map(owners_of, optimizers)
        has_planned = [each.plan() for each in owners if isinstance(each, MatrixOwners)]
        for optimizer in optimizers if any(has_planned) and topology.rank == 0 and topology.size > 1 else ():
            print(_describe_steps(optimizer, topology.size))


def _keys_of(strategy: Callable[[], Strategy], optimizer: torch.optim.Optimizer) -> Sequence[Sequence[str]]:
    """Returns the keys of the parameters of an optimizer, which the strategy has, with other objects."""
    return strategy().state.parameter_keys(optimizer)


def _describe_steps(optimizer: AcceleratedOptimizer, size: int) -> str:
    """Returns a line about the parameters of an optimizer that its ranks step as a whole."""
    name = type(optimizer.optimizer).__name__
    matrix_owners = owners_of(optimizer)
    owners = [] if matrix_owners is None else matrix_owners.owners()
    num_whole = sum(owner is not None for owner in owners)
    num_others = len(list(optimizer.parameters())) - num_whole
    whole = f"{num_whole} parameters as a whole, each on one of {size} ranks" if num_whole else ""
    others = f"{num_others} parameters on all ranks" if num_others else ""
    return f"{name} steps {' and '.join(filter(None, (whole, others)))}."


class _Packets:
    """Tensors of one dtype that this rank sends to and receives from the other ranks in one all-to-all."""

    def __init__(self) -> None:
        size = current_transport().size
        self._sent: list[list[Tensor]] = [[] for _ in range(size)]
        self._received: list[list[Tensor]] = [[] for _ in range(size)]

    def send(self, rank: int, *tensors: Tensor) -> None:
        self._sent[rank].extend(tensors)

    def receive(self, rank: int, *targets: Tensor) -> None:
        self._received[rank].extend(targets)

    def exchange(self, dtype: torch.dtype) -> None:
        """Sends the tensors, and fills the targets."""
        sent = [tensor.reshape(-1) for tensors in self._sent for tensor in tensors]
        targets = [target for tensors in self._received for target in tensors]
        device = next((tensor.device for tensor in (*sent, *targets)), None)
        packed = torch.cat([torch.empty(0, dtype=dtype, device=device), *sent])
        counts = [[sum(map(Tensor.numel, part)) for part in side] for side in (self._sent, self._received)]
        result = current_transport().all_to_all(packed, *counts)
        parts = torch.split(result, [target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))


def _content(key: str, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a shard of a parameter, that of its gradient, and whether it has a gradient, as 0 or 1."""
    shard, gradient = local_tensor(parameter), _local_gradient(parameter)
    if gradient is None:
        return shard, torch.zeros_like(shard), shard.new_zeros(1)
    if gradient.layout != torch.strided or gradient.dtype != shard.dtype:
        raise StateError(
            f"The gradient of {key} is a {gradient.layout} tensor of {gradient.dtype}, and matrices that are "
            f"sent to their owners need dense gradients of the dtype of the parameter ({shard.dtype}). "
            "Prepare the optimizer with whole_matrices=False."
        )
    return shard, gradient, shard.new_ones(1)


def _as_leaf(parameter: Tensor) -> Tensor:
    """Returns a parameter that is whole on this rank, or a plain one that shares its memory."""
    if not is_dtensor(parameter):
        return parameter
    return _leaf(local_tensor(parameter), _local_gradient(parameter))


def _leaf(value: Tensor, gradient: Tensor | None) -> nn.Parameter:
    leaf = nn.Parameter(value)
    leaf.grad = gradient
    return leaf


def _local_gradient(parameter: Any) -> Tensor | None:
    """Returns the gradient of the shard of a parameter, which may be distributed in another way."""
    gradient = parameter.grad
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return None if gradient is None else local_tensor(gradient)


def _copy(updated: Tensor, box: Box, shard: Tensor) -> None:
    """Copies a box of an updated matrix to the shard of its owner, unless they share memory."""
    part = box_of(updated, *box)
    if part.data_ptr() != shard.data_ptr():
        shard.copy_(part)


def _matrices_of(leaf: Tensor, splits: bool) -> list[Tensor]:
    """Returns the parameter that an optimizer steps, or the matrices of a batch, which share its memory."""
    if not splits or leaf.ndim != 3:
        return [leaf]
    gradients = [None] * len(leaf) if leaf.grad is None else leaf.grad.unbind()
    return [_leaf(*pair) for pair in zip(leaf.detach().unbind(), gradients, strict=True)]


def _divide_state(state: Any, parameter: Tensor, leaves: Sequence[Tensor]) -> None:
    """Moves the state of a parameter to the tensors that are stepped in its place."""
    if parameter not in state or leaves[0] is parameter:
        return
    values = state.pop(parameter)
    if leaves[0].ndim == parameter.ndim:
        state[leaves[0]] = values
        return
    for index, leaf in enumerate(leaves):
        state[leaf] = {name: value[index] for name, value in values.items()}


def _join_state(state: Any, parameter: Tensor, leaves: Sequence[Tensor]) -> None:
    """Moves the states of the tensors that were stepped in place of a parameter to the parameter.

    The states of the matrices of a batch are stacked in one tensor, of which they are views from then on.
    """
    if leaves[0] not in state or leaves[0] is parameter:
        return
    states = [state.pop(leaf) for leaf in leaves]
    if leaves[0].ndim == parameter.ndim:
        state[parameter] = states[0]
        return
    state[parameter] = {name: _stack([values[name] for values in states]) for name in states[0]}


def _stack(values: Sequence[Any]) -> Any:
    """Returns values as one tensor, of which they may be views already, or as a list."""
    first = values[0]
    if not isinstance(first, Tensor):
        return list(values)
    base = first._base
    if (
        base is not None
        and len(base) == len(values)
        and all(
            value._base is base and value.data_ptr() == row.data_ptr()
            for value, row in zip(values, base, strict=True)
        )
    ):
        return base
    return torch.stack(list(values))


def _box_of(key: str, parameter: Tensor) -> LocalBox:
    """Returns the box of a parameter on this rank, or raises an error for a parameter with several."""
    local, shard = to_local_shards(parameter, 0, 0), local_tensor(parameter.detach())
    assert isinstance(local, LocalShards)
    boxes = [(each.offsets, tuple(shard.shape)) for each in local.shards if shard.numel()]
    if type(shard) is not Tensor or len(boxes) > 1:
        raise PreparationError(
            f"{key} is a {type(parameter).__name__} of {type(shard).__name__}, of which a rank has "
            f"{len(boxes)} parts, and cannot be stepped as a whole. Pass whole_matrices=False to prepare()."
        )
    return LocalBox(local.shape, local.dtype, boxes[0] if boxes else None)
