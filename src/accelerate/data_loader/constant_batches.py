"""Shard of one process of global batches whose size does not depend on the number of processes.

`prepare_data_loader` uses it with `global_batch_size`. Each process gets its part of a global batch in
micro-batches, after the last of which the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import NamedTuple

from torch.utils.data import BatchSampler

from accelerate.data_loader.last_batch import Counts
from accelerate.data_loader.samplers import Batch, BatchSamplerShard, start_at


class StepPart(NamedTuple):
    """Part of a global batch that one process has in one micro-batch.

    Attributes:
        is_last: Whether the optimizer steps after it.
        weight: Factor of the mean loss over its samples, with which the mean over processes of the sums of
            all micro-batches is the mean over the samples of the global batch.
        batches: Number of batches of the user that the micro-batch takes on all processes together.
    """

    is_last: bool
    weight: float
    batches: int


@dataclass(frozen=True)
class StepPlan:
    """Division of the samples of one optimizer step into pieces of any sizes.

    Piece `i` is read by part `i % parts`, in its micro-batch `i // parts`.

    Attributes:
        bounds: Number of samples before each piece, and at the end that of all samples.
        parts: Number of processes, or of groups of them.
        batch_size: Number of samples in a batch of the user.
    """

    bounds: Sequence[int]
    parts: int
    batch_size: int = 1

    @classmethod
    def even(cls, samples: int, parts: int, batch_size: int) -> StepPlan:
        """Returns a plan with pieces of at most the batch size, whose sizes differ by at most one."""
        pieces = -(-samples // (parts * batch_size)) * parts
        return cls([samples * piece // pieces for piece in range(pieces + 1)], parts, batch_size)

    @property
    def samples(self) -> int:
        return self.bounds[-1]

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each part."""
        return -(-(len(self.bounds) - 1) // self.parts)

    def pieces_of(self, member: int, members: int) -> list[int]:
        """Returns the pieces of one of several members, each of which reads those of one or several parts."""
        return [piece for piece in range(len(self.bounds) - 1) if piece % self.parts % members == member]

    def span(self, micro_batch: int, part: int) -> slice:
        """Returns the samples of one part in a micro-batch."""
        piece = micro_batch * self.parts + part
        return slice(self.bounds[piece], self.bounds[piece + 1])

    def sizes(self, micro_batch: int) -> Counts:
        """Returns the number of samples of each part in a micro-batch."""
        spans = (self.span(micro_batch, part) for part in range(self.parts))
        return tuple(span.stop - span.start for span in spans)

    def batches_before(self, micro_batch: int) -> int:
        """Returns the number of batches of the user that the micro-batches before one take."""
        return -(-self.samples // self.batch_size) * micro_batch // self.num_micro_batches

    def part(self, micro_batch: int, part: int) -> StepPart:
        """Returns the part of one process in a micro-batch."""
        span = self.span(micro_batch, part)
        batches = self.batches_before(micro_batch + 1) - self.batches_before(micro_batch)
        weight = (span.stop - span.start) * self.parts / self.samples
        return StepPart(micro_batch + 1 == self.num_micro_batches, weight, batches)


class StepRecord(dict[int, Counts]):
    """Record of padding of one pass, which also has the plan of each step.

    Attributes:
        full: Plan of a full global batch.
        last: Number of the last step and its plan, once its indices are drawn.
    """

    def __init__(self, full: StepPlan) -> None:
        super().__init__()
        self.full = full
        self.last: tuple[int, StepPlan] | None = None

    def part(self, number: int, part: int) -> StepPart:
        """Returns the part of one process in the micro-batch with this number in the pass."""
        step, micro_batch = divmod(number, self.full.num_micro_batches)
        plan = self.last[1] if self.last is not None and self.last[0] == step else self.full
        return plan.part(micro_batch, part)


@dataclass(eq=False, repr=False)
class ConstantBatchShard(BatchSamplerShard):
    """Shard of one process of global batches of a constant size.

    A global batch has the next `global_batch_size` indices of the order. All processes get the same number of
    micro-batches of it, of at most the batch size of the user. The last global batch has the remaining
    indices, or is dropped with a true `drop_last`. If it has fewer indices than there are processes, those
    without one get an index of another process, which does not count.

    Args:
        global_batch_size: Number of indices in a global batch, a multiple of the batch size.
    """

    global_batch_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.full = StepPlan.even(self.global_batch_size, self.num_processes, self.batch_size)
        self.batch_size = max(self.full.sizes(0))

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples in a micro-batch of all processes, or None if it differs between them."""
        size = self.batch_size * self.num_processes
        return None if self.global_batch_size % size else size

    def iter_from(self, number: int) -> Iterator[Batch]:
        record = self.padding_record = StepRecord(self.full)
        return self._micro_batches(number, record)

    def _micro_batches(self, number: int, record: StepRecord) -> Iterator[Batch]:
        first, skipped = divmod(number, self.full.num_micro_batches)
        source: Iterator[Batch] = start_at(self.batch_sampler, self.batches_before(number - skipped))
        if self.order_check is not None:
            source = self.order_check.watch(source)
        indices = chain.from_iterable(source)
        for step in count(first):
            samples = list(islice(indices, self.global_batch_size))
            plan = self.full
            if len(samples) < self.global_batch_size:
                if not samples or self.drop_last:
                    return
                plan = StepPlan.even(len(samples), self.num_processes, self.full.batch_size)
                record.last = step, plan
            sizes = [plan.sizes(micro_batch) for micro_batch in range(plan.num_micro_batches)]
            for micro_batch in range(skipped, plan.num_micro_batches):
                if set(sizes[micro_batch]) != {self.batch_size}:
                    record[step * self.full.num_micro_batches + micro_batch] = sizes[micro_batch]
                yield samples[plan.span(micro_batch, self.process_index)] or samples[:1]
            skipped = 0

    def batches_before(self, number: int) -> int:
        """Returns the number of batches of the user that the first `number` micro-batches take."""
        step, micro_batch = divmod(number, self.full.num_micro_batches)
        return step * (self.global_batch_size // self.full.batch_size) + self.full.batches_before(micro_batch)

    def __len__(self) -> int:
        steps, rest = divmod(self._num_samples(), self.global_batch_size)
        last = 0 if self.drop_last else -(-rest // (self.num_processes * self.full.batch_size))
        return steps * self.full.num_micro_batches + last

    def _num_samples(self) -> int:
        """Returns the number of indices that the batch sampler has left."""
        if self.drop_last:
            return len(self.batch_sampler) * self.full.batch_size
        skipped = getattr(self.batch_sampler, "skip_batches", 0)
        return max(len(self.sampler) - skipped * self.full.batch_size, 0)


def has_constant_batches(index_sampler: object, global_batch_size: int) -> bool:
    """Returns whether the batches of an index sampler are divided into global batches of a constant size."""
    return type(index_sampler) is BatchSampler and global_batch_size % index_sampler.batch_size == 0
