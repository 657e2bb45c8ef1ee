"""A prepared loader that starts in the middle of an epoch."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.base import CheckpointError
from accelerate.data_loader.base import DataLoaderAdapter
from accelerate.data_loader.iterable import IterableDatasetShard
from accelerate.data_loader.position import Place, Resume
from accelerate.data_loader.samplers import BatchSamplerShard, SkipBatchSampler, rest_of


def start_late(loader: DataLoaderAdapter, skipped: int) -> DataLoader[Any]:
    """Return a loader like this one that starts late, at each of its passes.

    Where a checkpoint of a run of another size, or with batches of another size, was loaded, and as many
    batches are to be passed over as the loop had been given then, it starts behind the samples that were
    given to all processes of that run.

    Args:
        loader: stays as it is; both count epochs together.
        skipped: batches of this process that are passed over.
    """
    resume = loader.position.resume
    if resume is None or skipped != resume.place.seen:
        return _later_round(loader, skipped)
    if resume.is_over and isinstance(loader.dataset, IterableDataset):
        return variant_of(loader, origin=loader, begins_at=resume.place, is_over=True)
    _refuse_other_shares(loader, resume)
    if resume.place.stream is not None:  # the dataset itself goes on from there
        return variant_of(loader, origin=loader, begins_at=resume.place)
    place = _place_in_batches_of(loader, resume)
    if resume.groups != loader.plan.groups or place != resume.place:
        return _rest_shared_anew(loader, place)
    return _later_round(loader, skipped)


def start_where_saved(loader: DataLoaderAdapter) -> DataLoader[Any] | None:
    """Return the late start by which a loader goes on by itself; None where it begins an epoch.

    Args:
        loader: a prepared one.
    """
    resume = loader.position.resume
    if (
        resume is None
        or not resume.place.seen
        or not loader.use_stateful_dataloader
        or loader.origin is not None
    ):
        return None
    if loader.torchdata_goes_on and not resume.is_over:
        return None
    return start_late(loader, resume.place.seen)


def _refuse_other_shares(loader: DataLoaderAdapter, resume: Resume) -> None:
    """Raise where the groups had shares of the dataset that those of now have not."""
    own_shares, groups = loader.plan.own_shares, loader.plan.groups
    if (resume.own_shares, resume.groups) == (own_shares, groups) or not (own_shares or resume.own_shares):
        return
    before = "its own shares" if resume.own_shares else "batches of the whole"
    raise CheckpointError(
        f"{loader!r} cannot go on in the middle of this epoch: {resume.groups} data-parallel groups read "
        f"{before} then, and what they have left of the dataset is no share of {groups} groups. Go on with "
        f"{resume.groups} until the end of the epoch, or from a checkpoint between two epochs; loaders with "
        "dispatch_batches=True can go on with any number."
    )


def _place_in_batches_of(loader: DataLoaderAdapter, resume: Resume) -> Place:
    """The point in the epoch that a checkpoint tells, counted in the batches of this loader."""
    before, now = resume.rows_in_batch, loader.plan.rows_in_batch
    if before is None or now is None or before == now or resume.is_over:
        return resume.place
    samples = resume.place.consumed * before
    if samples % now or loader.plan.own_shares:
        shares = "the batches of shares that the dataset gives are counted, not its samples"
        why = shares if loader.plan.own_shares else f"behind them no batch of {now} begins"
        raise CheckpointError(
            f"{loader!r} cannot go on in the middle of this epoch: {samples} of its samples were given in "
            f"batches of {before} and not of {now}, and {why}. Go on with batches of {before} until the end "
            "of the epoch, or from a checkpoint between two epochs."
        )
    return resume.place._replace(consumed=samples // now)


def _later_round(loader: DataLoaderAdapter, skipped: int) -> DataLoader[Any]:
    """The same loader from a later round on; rounds keep their numbers and what fills them."""
    before = loader.begins_at
    place = Place(before.seen + skipped, before.consumed + skipped * loader.batches_in_round)
    if isinstance(loader.dataset, IterableDataset):
        changed: dict[str, Any] = {"skip_batches": loader.skip_batches + skipped}
    else:
        changed = skipping(loader, skipped * loader.batches_per_step, loader.batches_kept)
    changed.update(_epoch_of_own_shard(loader))
    keeps = place.seen > 0
    return variant_of(loader, origin=loader, begins_at=place, keeps_first_round=keeps, **changed)


def _epoch_of_own_shard(loader: DataLoaderAdapter) -> dict[str, Any]:
    """The epoch of the sampler under a shard that the user built and not `prepare`: a late start keeps it."""
    is_own = "plan" not in loader.__dict__ and isinstance(loader.batch_sampler, BatchSamplerShard)
    epoch = getattr(loader.get_sampler(), "epoch", None)
    return {"iteration": epoch} if is_own and isinstance(epoch, int) else {}


def _rest_shared_anew(loader: DataLoaderAdapter, place: Place) -> DataLoader[Any]:
    """What another number of groups, or other batches, have left of an epoch, for the groups of now."""
    changed: dict[str, Any] = {"origin": loader, "begins_at": place}
    dataset = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        rest = copy(dataset)
        rest.skip_samples = place.consumed * dataset.part_size
        return variant_of(loader, dataset=rest, **changed)
    if isinstance(dataset, IterableDataset):
        return variant_of(loader, skip_source=place.consumed, **changed)
    name = _name_of_index_sampler(loader)
    return variant_of(loader, **{name: rest_of(getattr(loader, name), place.consumed)}, **changed)


def skipping(loader: DataLoader[Any], skipped: int, kept: int = 0) -> dict[str, Any]:
    """Return what of a loader over map-style data changes when it starts late.

    Args:
        loader: a prepared one, or a plain one.
        skipped: how many of the batches it reads by are passed over.
        kept: how many of them, at the beginning, are read all the same.
    """
    name = _name_of_index_sampler(loader)
    return {name: SkipBatchSampler(getattr(loader, name), skipped, kept)}


def _name_of_index_sampler(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def variant_of(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader that is the same but for some attributes, also those that torch forbids to assign later."""
    kind = type(loader)
    variant = kind.__new__(kind)
    variant.__dict__.update(loader.__dict__, _iterator=None, **changed)
    return variant
