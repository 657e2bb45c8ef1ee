"""Training steps of a run with replica groups, each of which is a transaction.

A step begins when a loader yields its first batch. It ends with a vote in the step of the optimizer. If a
replica group has ended meanwhile, the others repeat the step with the same batches.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from accelerate import rng, strategies
from accelerate.base import RecoveryError, StateError
from accelerate.checkpointing import StateItem, apply_items, capture_items, check_items
from accelerate.data_loader import Position
from accelerate.launch import FIRST_STEP
from accelerate.logging import get_logger
from accelerate.ops import Transport, current_transport
from accelerate.recovery.checks import check_settings, refuse
from accelerate.recovery.groups import DrivenAccumulation, ReplicaGroups, Request
from accelerate.recovery.loader import RecoveryLoader, prepare_replicated
from accelerate.recovery.membership import Members, Membership
from accelerate.recovery.run import Run
from accelerate.recovery.run_values import RunValues
from accelerate.recovery.step_state import StepState
from accelerate.recovery.transport import MemberLostError, MemberTransport
from accelerate.state import GradientState, Leader, record_event, run_observers, services, step_clock

logger = get_logger(__name__)

Result = TypeVar("Result")

REQUESTS: tuple[Request, ...] = ("save", "stop")
PAUSE = 0.2
"""Seconds between two attempts to join a replica group with state."""


def open_recovery(
    variables: Mapping[str, str],
    strategy: strategies.Strategy,
    gradients: GradientState,
    prepared: strategies.Prepared,
    items: Callable[[], Sequence[StateItem]],
) -> Recovery:
    """Returns the replica groups of a run that was launched with `--replicas`."""
    if services.find(Recovery) is not None:
        raise StateError(
            "A second Accelerator was created in a run with replica groups, whose steps belong to the first "
            "one. Create one Accelerator, or leave --replicas out."
        )
    return Recovery(Run.of(variables), strategy, gradients, prepared, items)


class Recovery(ReplicaGroups):
    """Replica groups of a run that was launched with `--replicas`, and the step that they take.

    It is an observer of the run.

    Args:
        run: Number of replica groups, and the addresses of the run.
        gradients: State that says whether the current micro-batch is the last one of this replica group.
        items: Returns the stateful objects of the run, whose states joining replica groups receive.

    Attributes:
        num_replicas: Number of replica groups that were launched.
        replica: Index of this replica group.
        shrinks_batch: Whether the global batch shrinks with the number of members.
        members: Replica groups of the last step, or None before the first one.
        in_pass: Whether a pass for training is read.
    """

    repeats_steps = True

    def __init__(
        self,
        run: Run,
        strategy: strategies.Strategy,
        gradients: GradientState,
        prepared: strategies.Prepared,
        items: Callable[[], Sequence[StateItem]],
    ) -> None:
        super().__init__(prepared)
        self._run, self._strategy, self._gradients = run, strategy, gradients
        self._items = items
        check_settings(strategy.context.request, gradients)
        self.num_replicas, self.replica = run.replicas, run.replica
        self.shrinks_batch = run.batch == "shrink"
        self.members: Members | None = None
        self.in_pass = False
        self._accumulation: DrivenAccumulation | None = None
        self._membership: Membership | None = None
        self._loader: RecoveryLoader | None = None
        self._outcome: bool | None = None
        self._step = StepState(strategy, prepared, len(REQUESTS))
        self._is_behind = False
        self._has_committed = False
        self._num_loaders = self._num_barriers = 0
        self._left: tuple[RecoveryLoader, int] | None = None  # a loader, and the pass that the loop has left
        self._transport: MemberTransport | None = None
        self._requested = dict.fromkeys(REQUESTS, False)  # by this replica group, and not shared yet
        self._shared = dict.fromkeys(REQUESTS, False)
        self._store = RunValues(run)
        is_first = run.replica == 0 and not self._store.ask(self._store.has_begun)
        self._leader = services.put(Leader, Leader(is_first, self._wait_for_others))
        services.put(Recovery, self, end=self._shut_down)
        run_observers().add(self)

    # Prepare

    @cached_property
    def seed(self) -> int:
        """Seed of the order of the samples, and of the random numbers of each micro-batch.

        It is that of torch in the first replica group that asks. Called on all ranks of a replica group.
        """
        return self._store.ask(self._store.choose_seed)

    def drive(self, accumulation: DrivenAccumulation) -> None:
        """Sets the accumulation whose micro-batches begin when a loader yields their batches."""
        self._accumulation = accumulation

    def prepare_loader(
        self, loader: Iterable[Any], prepare: Callable[..., Any], options: Mapping[str, Any]
    ) -> RecoveryLoader:
        """Returns a loader that divides the batches of a step among the members."""
        prepared = prepare_replicated(self._num_loaders, loader, self, prepare, options)
        self._num_loaders += 1
        self._prepared.custom.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any) -> None:
        optimizer.conditions = (*optimizer.conditions, self.commit)

    def prepare_scheduler(self, scheduler: Any) -> None:
        scheduler.num_processes *= self.num_replicas

    def check_use(self, name: str, value: object) -> None:
        if name != "gradient_accumulation_steps" or self.in_pass:
            refuse(name, value)

    def own_folder(self, folder: Path) -> Path:
        """Returns the folder of this replica group, because each keeps its own copy of the same state."""
        return folder / f"replica_{self.replica}"

    @property
    def is_training(self) -> bool:
        """True if a model is in training mode and gradients are computed."""
        models = self._prepared.models
        has_optimizer = bool(self._prepared.optimizers)
        return has_optimizer and torch.is_grad_enabled() and any(model.training for model in models)

    # Steps

    def begin_pass(self, loader: RecoveryLoader, number: int) -> bool:
        """Returns whether this replica group takes part in a pass for training, which is not over."""
        self.ended()
        over = self._store.num_passes_over(loader.number)
        self._is_behind = number < over
        self._leader.is_leader = self._leader.is_leader and not self._is_behind
        self._set_in_pass(not self._is_behind)
        if number > over:  # an iterator over the pass before is still open
            self._store.set_passes_over(loader.number, number)
        return self.in_pass

    def end_pass(self) -> None:
        """Ends a pass, in which no step is taken any more."""
        self._set_in_pass(False)

    def _set_in_pass(self, in_pass: bool) -> None:
        self.in_pass = in_pass
        if self._accumulation is not None:
            self._accumulation.is_driven, self._accumulation.loss_factor = in_pass, 1.0

    def begin_step(self, loader: RecoveryLoader) -> Members:
        """Agrees on the members of the next step, and receives their state if this replica group joins."""
        if self._membership is None:
            self._membership = self._open()  # the lighthouse knows this replica group from now on
        self._loader = loader
        num_before = 0 if self.members is None else self.members.size
        self._outcome = None
        self._transport = None
        epoch = loader.position.epoch
        self.members = self._begin_with_state(self._membership, loader)
        if self._membership.num_committed == 0 and loader.position.epoch == epoch:
            self.members = self._begin_together(self.members)
        self._leader.is_leader = self.members.index == 0
        self._step.begin()
        if self.members.size != num_before:
            text = f"{self.members.size} of {self.num_replicas} replica groups take the steps"
            record_event("members", text)
        return self.members

    def _begin_with_state(self, membership: Membership, loader: RecoveryLoader) -> Members:
        """Agrees on the members, and waits for those that a replica group without state must not leave out.

        Before the first committed step of the run, these are all replica groups. Later it is a group with
        state, which may be slow to answer. The loader moves behind a pass that the others end meanwhile.
        """
        deadline = time.monotonic() + self._run.timeout
        while True:
            if membership.num_committed == 0 and not self._store.ask(self._store.has_begun):
                self._store.wait_for_all(FIRST_STEP)
            members = membership.begin()
            if membership.num_committed:
                return members
            life, has_begun, over, is_late = self._store.ask(
                lambda: (
                    self._store.read_life(),
                    self._store.has_begun(),
                    self._store.num_passes_over(loader.number),
                    time.monotonic() > deadline,
                )
            )
            if life != self._store.life:
                raise RecoveryError(
                    "All replica groups have ended since this one began, so it does not know where the run "
                    "continues. The launcher starts it again."
                )
            if has_begun and over > loader.position.epoch:
                loader.position = Position(over)
                return members
            if has_begun and is_late:
                raise RecoveryError(
                    f"The replica groups that have taken steps sent no state within {self._run.timeout} s. "
                    "They have ended, or do not reach their next step."
                )
            if not has_begun and (is_late or members.size == self.num_replicas):
                return members
            membership.decline()
            time.sleep(PAUSE)

    def before_load_state(self) -> None:
        """Raises an error if this replica group has taken steps, whose passes are over in all groups."""
        if self._has_committed:
            raise StateError(
                "load_state() was called after replica groups have taken steps, and they would skip the "
                "batches between the checkpoint and these steps. Call it before the first step, or leave "
                "--replicas out."
            )

    def held_by_all(self, names: list[str]) -> list[str]:
        """Returns the names that all replica groups pass, or all names while others train and send state."""
        store = self._store
        return store.ask(lambda: names if store.has_begun() else store.held_by_all(names))

    def _begin_together(self, members: Members) -> Members:
        """Sends the weights of the first member to the others before the first step."""
        assert self._membership is not None
        while not self._membership.send_from_first(members, self._step.weights()):
            self._membership.commit()
            members = self._membership.begin()
        return members

    def decline_step(self) -> None:
        """Leaves a step whose members are in a later pass, and which they repeat without this group."""
        assert self._membership is not None
        self._membership.decline()
        self._is_behind = True

    def begin_micro_batch(
        self, number: tuple[int, int, int], *, is_own: bool, is_last: bool, loss_scale: float
    ) -> None:
        """Sets the random numbers of a micro-batch, and whether it is the last one of this replica group.

        Args:
            number: Pass, batch and replica group to which the micro-batch belongs.
            is_own: Whether the micro-batch is one of those that this replica group has without a failure.
                Others leave buffers and attributes of the models unchanged.
            is_last: Whether the optimizer steps after it.
            loss_scale: Factor of its loss, besides that of gradient accumulation.
        """
        self._step.begin_micro_batch(is_own=is_own)
        digest = hashlib.blake2b(repr((self.seed, *number)).encode(), digest_size=8).digest()
        rng.set_seed(int.from_bytes(digest, "little") % 2**31 + current_transport().rank)
        is_first = self._gradients.sync_gradients  # the micro-batch before was the last of its step
        self._gradients._set_sync_gradients(is_last)
        if self._accumulation is None:
            return
        self._accumulation.loss_factor = loss_scale
        if not (is_first and is_last):
            self._accumulation.begin_window(is_first=is_first, is_last=is_last)

    def before_backward(self, loss: object, arguments: object) -> None:
        """Takes the sums of earlier backward passes of this step, which are not to be added up again."""
        if self.in_pass and self._outcome is not None:
            raise StateError(
                "accelerator.backward(loss) was called after an optimizer has stepped on this batch. After a "
                "failure, a replica group computes several batches in one step of the run, and cannot update "
                "parameters between the losses of one of them. Compute all losses of a batch before the "
                "first optimizer.step(), or leave --replicas out."
            )
        if self.in_pass:
            self._step.begin_backward()

    def after_backward(self) -> None:
        """Adds up the gradients of all members, after a backward pass of the last micro-batch."""
        if not self.in_pass:
            return
        is_last = self._gradients.sync_gradients
        if is_last:
            assert self._membership is not None
            self._step.add_up(self._membership, [*self._requested.values()])
        self._step.keep_gradients(undoes_changes=not is_last and self._gradients.num_steps == 1)

    def commit(self) -> bool:
        """Returns whether the optimizers take the step, which is decided once for each step."""
        if not self.in_pass:
            return True
        if self._outcome is None:
            assert self._membership is not None
            assert self._loader is not None
            assert self.members is not None
            self._step.restore_kept()
            self._step.share_buffers(self._membership, self.members)
            self._outcome = self._membership.commit()
            if self._outcome:
                self._loader.advance()
                for name, count in zip(REQUESTS, self._step.counts, strict=True):
                    if count:
                        self._shared[name], self._requested[name] = True, False
                if current_transport().rank == 0:
                    is_first = not self._has_committed
                    self._store.note_step(self._membership.num_committed, is_first=is_first)
                self._has_committed = True
            else:
                self._step.restore()
                logger.info("A replica group has ended. The step is repeated with the same samples.")
        return self._outcome

    def read_request(self, name: Request, is_requested: bool) -> bool:
        if self._membership is None:  # the steps have not begun
            return is_requested
        self._requested[name] = self._requested[name] or (is_requested and not self._shared[name])
        is_shared = self._shared[name]
        self._shared[name] = is_shared and name != "save"
        return is_shared

    def check_step(self) -> None:
        """Raises an error if no optimizer has stepped after the batches of a step."""
        if self._outcome is None:
            raise StateError(
                "The batches of a step were read and no prepared optimizer has stepped, so the other replica "
                "groups would wait for this one. Call optimizer.step() after each batch, and model.eval() "
                "before an evaluation."
            )

    def leave_pass(self, loader: RecoveryLoader, number: int) -> None:
        """Notes that the loop has left a pass before its end.

        If the script continues, the pass ends for all members. If an error ends it, they continue the pass.
        """
        self._left = loader, number

    def ended(self) -> None:
        """Ends the pass that the loop has left, together with the other members.

        They continue it while an error is handled, which may end this replica group.
        """
        if self._left is None or sys.exc_info()[0] is not None:
            return
        (loader, number), self._left = self._left, None
        assert self._membership is not None
        if self._outcome is None:
            self._membership.decline()
        self._store.note_left(loader.number, number)
        while True:
            self.begin_step(loader)
            if loader.position.epoch > number:  # the others have ended the pass meanwhile
                self.decline_step()
                return
            if self.end_data():
                loader.position = Position(number + 1)
                return

    def is_left(self, loader: RecoveryLoader, number: int) -> bool:
        """Returns whether the loop of a member has left a pass."""
        return self._store.ask(lambda: self._store.is_left(loader.number, number))

    def end_data(self) -> bool:
        """Ends the data of a pass on all members together, and returns whether all of them are there."""
        assert self._membership is not None
        assert self._loader is not None
        self._membership.sum(torch.zeros(1, device=self._strategy.context.device))
        if not self._membership.commit():
            return False
        over = max(self._store.num_passes_over(self._loader.number), self._loader.position.epoch + 1)
        self._store.set_passes_over(self._loader.number, over)
        return True

    def _wait_for_others(self) -> None:
        """Waits for the other replica groups before the first step, and for the members between passes.

        Inside a pass, members are in different micro-batches and do not wait for each other.
        """
        if self._membership is None and not self._is_behind:
            self._num_barriers += 1
            if not self._store.ask(self._store.has_begun):
                self._store.wait_for_all(f"barrier {self._num_barriers}")
        elif self.member_transport() is not None:
            self.run(lambda: current_transport().barrier(), alone=lambda: None)

    def _open(self) -> Membership:
        run = self._run
        return Membership(
            replica=run.replica,
            min_replicas=run.min_replicas,
            lighthouse=run.lighthouse,
            timeout=float(run.timeout),
            group=current_transport(),
            device=self._strategy.context.device,
            capture=lambda: capture_items(self._common_items()),
            apply=self._apply,
        )

    def _common_items(self) -> list[StateItem]:
        return [item for item in self._items() if item.held_by != "rank"]

    def _apply(self, states: Mapping[str, Sequence[Any]]) -> None:
        passes = [(obj, obj.num_passes) for obj in self._prepared.custom if type(obj) is RecoveryLoader]
        items = self._common_items()
        check_items(items, states)
        apply_items(items, states)
        step_clock.restart_numbers()
        for loader, number in passes:
            loader.num_passes = number

    # Collectives outside of passes for training

    @property
    def evaluating_members(self) -> Members:
        """Members among which an evaluation is divided, or this replica group alone."""
        transport = self.member_transport()
        return self.members if transport is not None and self.members is not None else Members(0, 1)

    def member_transport(self) -> Transport | None:
        """Returns the transport over all members, or None where collectives are within a replica group."""
        self.ended()
        if self.in_pass or self._left or self._is_behind or self._membership is None or self.members is None:
            return None
        if self.members.size == 1:
            return None
        if self._transport is None:
            self._transport = MemberTransport(self._membership, self.members, current_transport())
        return None if self._transport.is_broken else self._transport

    def run(self, collective: Callable[[], Result], alone: Callable[[], Result] | None = None) -> Result:
        """Runs a collective over the ranks of all members, or over those of this replica group.

        Args:
            collective: The collective.
            alone: Runs it within this replica group after a member has ended. None is `collective`.
        """
        transport = self.member_transport()
        if transport is None:
            return collective()
        own = current_transport()
        services.put(Transport, transport, uses_group=True)
        try:
            return collective()
        except MemberLostError:
            logger.warning(
                "A replica group has ended outside of a pass for training. Until the next step, gathered "
                "values and metrics are those of each replica group."
            )
        finally:
            services.put(Transport, own, uses_group=True)
        return (alone or collective)()

    @property
    def is_leader(self) -> bool:  # type: ignore[override]
        """True in the replica group that writes checkpoints and prints."""
        return self._leader.is_leader

    @property
    def is_behind(self) -> bool:
        """True in a replica group that has joined and runs through passes that are over."""
        return self._is_behind

    def _shut_down(self) -> None:
        if self._membership is not None:
            self._membership.shut_down()
