"""Comparison of the records of two runs, and the likely causes of differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate.verification.options import BUFFER, INPUT, WEIGHTS_FILE
from accelerate.verification.records import Finding, Run, Step, Tolerances

TRACED = ("loss", "gradient norm")
"""Differences whose cause may be found in the outputs of modules."""
ROUNDED_RATE = 0.15
"""Relative difference of learning rates that the rounding of the length of a small loader explains."""
MAX_SHOWN = 8  # samples or names in one line


def compare(run: Run, reference: Run, tolerances: Tolerances) -> list[Finding]:
    """Returns the first difference of each kind of a run from the reference.

    Later differences follow from an earlier one, except for learning rates, because the reference steps with
    those of the run.
    """
    findings = [*_compare_steps(run, reference, tolerances), *_compare_weights(run, reference, tolerances)]
    rates = [finding for finding in findings if finding.what == "learning rate"]
    first = [finding for finding in findings if finding.what != "learning rate"][:1]
    if first and first[0].what in TRACED and not first[0].cause and run.outputs:
        first = [first[0]._replace(cause=_explain(first[0], run, reference, tolerances))]
    notes = [_note_of_batch_norms(run)] if run.batch_norms and run.num_groups > 1 else []
    return [*first, *sorted(rates, key=lambda finding: finding.is_expected)[:1], *notes]


def find_traced(findings: Sequence[Finding]) -> Finding | None:
    """Returns the first difference if the outputs of modules in its step may explain it, or None."""
    first = next(iter(findings), None)
    return first if first is not None and first.what in TRACED and not first.cause else None


def with_cause(findings: Sequence[Finding], traced: Sequence[Finding]) -> list[Finding]:
    """Returns the differences of two runs, the first one with the cause that repeated runs have found."""
    first, *others = findings
    again = next(iter(traced), None)
    if again is None or (again.optimizer, again.step, again.what) != (
        first.optimizer,
        first.step,
        first.what,
    ):
        cause = "It was another one, or none, when both runs were repeated, so it is not deterministic."
        return [first._replace(cause=cause), *others]
    return [first._replace(cause=again.cause), *others]


def _explain(finding: Finding, run: Run, reference: Run, tolerances: Tolerances) -> str:
    """Returns the likely cause of a difference, from the step that was traced."""
    for key, expected in reference.steps.items():
        own = run.steps[key].contents if key in run.steps and key[1] == finding.step else {}
        for name, digest in own.items():
            other = expected.contents.get(name, digest)
            if digest != other and digest.split()[:-1] == other.split()[:-1]:
                return (
                    f"Sample {name.rsplit('/', 1)[1]} has other values than in the reference. The dataset "
                    "differs between ranks, such as one that the script has divided itself, or it has a "
                    "generator of its own, or collate_fn draws numbers of numpy."
                )
    if finding.what == "loss":
        return _explain_outputs(run, reference, tolerances)
    text = _explain_outputs(run, reference, tolerances, is_loss_equal=True)
    for name in dict.fromkeys([*reference.gradients, *run.gradients]) if "are those" in text else ():
        own_norm, other_norm = run.gradients.get(name), reference.gradients.get(name)
        path = name.partition(":")[2]
        if own_norm is None or other_norm is None:
            where = "the reference" if own_norm is None else "this launch"
            return f"{text} Only {where} has a gradient of `{path}`, which the other does not train."
        if abs(own_norm - other_norm) > 2 * tolerances.norm * max(own_norm, other_norm):
            return f"{text} The gradient of `{path}` has norm {own_norm:.4g}, and {other_norm:.4g} there."
    return text


def _explain_outputs(run: Run, reference: Run, tolerances: Tolerances, *, is_loss_equal: bool = False) -> str:
    """Returns the first module whose outputs differ in the step that was traced."""
    expected = _joined(reference.outputs)
    own = _joined(run.outputs)
    num_compared, has_other_sizes = 0, False
    for name, (widths, rows) in expected.items():
        num_rows = len(own[name][1]) if name in own else 0
        if num_rows != len(rows) and name in own and name.startswith(INPUT):
            return f"The model gets {num_rows} rows in this step, and {len(rows)} in the reference."
        if num_rows != len(rows) or own[name][0] != widths:
            has_other_sizes = has_other_sizes or name in own
            continue
        num_compared += not name.startswith(INPUT)
        bound = tolerances.loss * max(map(abs, rows), default=0.0)
        is_equal = all(abs(a - b) <= bound for a, b in zip(sorted(own[name][1]), sorted(rows), strict=True))
        if not is_equal and name.startswith(INPUT):
            return (
                "The model gets other inputs than in the reference for the same samples. The script changes "
                "them with random numbers or by the rank, such as an augmentation or a mask."
            )
        if not is_equal:
            number, _, path = name.partition(":")
            where = f"`{path}`" if path else "the model"
            model = f" of model {number}" if number != "0" else ""
            return f"The outputs of {where}{model} are the first that differ from those of the reference."
    if not num_compared:
        cause = _OF_SHARDS if run.divides_sequences else _OF_TOKENS
        return cause if has_other_sizes and not is_loss_equal else ""
    if is_loss_equal:
        return (
            f"The outputs of {_modules(num_compared)} and the loss are those of the reference, so the script "
            "clips, scales, clears or freezes gradients differently, or the backward pass differs."
        )
    return (
        f"The outputs of {_modules(num_compared)} are those of the reference, so the targets, the loss or "
        "the backward pass differ. The loss may depend on which samples one rank has: negatives of the "
        "batch, or a mean over a number of tokens that differs between ranks (pass it as "
        "accumulate(num_items=...))."
    )


_OF_TOKENS = (
    "Ranks pad their batches to other lengths than the reference, so the outputs of modules cannot be "
    "compared. The loss may be a mean over a number of tokens that differs between ranks: pass this number "
    "as accumulate(num_items=...)."
)
_OF_SHARDS = (
    "Each rank has a part of the sequences, so the outputs of modules cannot be compared. Labels and "
    "positions must be those of whole sequences: a rank that shifts its own labels lacks that of its last "
    "position, and one that counts positions begins at 0. Shift labels and count positions before "
    "accelerator.maybe_context_parallel, and pass them as buffers. A loss other than a mean of cross_entropy "
    "or lm_loss is one over the positions of a rank."
)


def _modules(number: int) -> str:
    return "1 module" if number == 1 else f"{number} modules"


_WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")


def _joined(
    outputs: Mapping[int, Mapping[str, list[list[float]]]],
) -> dict[str, tuple[set[float], list[float]]]:
    """Returns the widths and the projections of rows of the outputs of modules, over all groups of ranks."""
    joined: dict[str, tuple[set[float], list[float]]] = {}
    for group in outputs.values():
        for name, calls in group.items():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            for width, *rows in calls:
                widths, values = joined.setdefault(name, (set(), []))
                widths.add(width)
                values.extend(rows)
    return joined


def _note_of_batch_norms(run: Run) -> Finding:
    name, more = run.batch_norms[0], len(run.batch_norms) - 1
    names = f"`{name}` and {more} more normalize" if more else f"`{name}` normalizes"
    text = f"{names} over the batch of each rank, 1/{run.num_groups} of the batch of a step"
    cause = (
        "The reference does the same. One process with the whole batch has other statistics; "
        "nn.SyncBatchNorm.convert_sync_batchnorm(model) shares them on GPUs."
    )
    return Finding(0, "batch normalization", text, cause, is_expected=True)


def _compare_steps(run: Run, reference: Run, tolerances: Tolerances) -> Iterator[Finding]:
    losses = [step.loss for step in reference.steps.values() if step.loss is not None]
    scale = max((abs(loss) for loss in losses if math.isfinite(loss)), default=0.0)
    for key, expected in reference.steps.items():
        number, step = key[1], run.steps.get(key)
        if step is None:
            yield Finding(number, "steps", "only the reference took this step", _STEPS_CAUSE)
            continue
        for finding in _compare_step(number, step, expected, run, tolerances, scale):
            yield finding._replace(optimizer=key[0])
    for optimizer, number in run.steps.keys() - reference.steps.keys():
        yield Finding(
            number, "steps", f"only this launch took this step of optimizer {optimizer}", _STEPS_CAUSE
        )


def _compare_step(
    number: int, step: Step, expected: Step, run: Run, tolerances: Tolerances, scale: float
) -> Iterator[Finding]:
    """Yields the differences of one step, of which the largest loss of the reference is `scale`."""
    if len({tuple(rates) for rates in step.rates_of_ranks}) > 1:
        ranks = ", ".join(f"{_numbers(rates)} on rank {i}" for i, rates in enumerate(step.rates_of_ranks))
        cause = "A schedule uses a value that differs between ranks, such as the loss of one rank: gather it."
        yield Finding(number, "learning rate", f"the learning rate is {ranks}", cause)
    compare_samples = _compare_samples if step.by_index and expected.by_index else _compare_contents
    if step.samples and expected.samples and (difference := compare_samples(step, expected)):
        yield Finding(number, "samples", *difference)
    if step.loss is not None and expected.loss is not None:
        bound = tolerances.loss * max(scale, 1e-8)
        if not _is_close(step.loss, expected.loss, bound):
            text = f"the loss is {step.loss:.6g}, and {expected.loss:.6g} in the reference"
            is_unprepared = step.samples and not any(step.samples.values())
            factor = _cause_of_factor(step.loss, expected.loss, run, "loss")
            yield Finding(number, "loss", text, _UNPREPARED if is_unprepared else factor)
    yield from _compare_norms(number, step, expected, run, tolerances)
    if not _are_close(step.rates, expected.rates, 1e-6):
        yield _compare_rates(number, step, expected, run)
        return
    for own, other in zip(step.settings, expected.settings, strict=False):
        for name in own.keys() & other.keys():
            values, wanted = (
                each[name] if isinstance(each[name], list) else [each[name]] for each in (own, other)
            )
            if not _are_close(values, wanted, tolerances.norm):
                text = (
                    f"{name} of the optimizer is {_numbers(values)}, and {_numbers(wanted)} in the reference"
                )
                cause = "The script makes it depend on the number of processes."
                yield Finding(number, "settings", text, cause)


_UNPREPARED = (
    "No batch of a prepared loader was read for this step, so each rank may have read the same samples. "
    "Pass the loader to accelerator.prepare."
)
_STEPS_CAUSE = (
    "The lengths of loaders, or the number of steps in the script, depend on the number of processes."
)


def _compare_rates(number: int, step: Step, expected: Step, run: Run) -> Finding:
    """Returns the difference of learning rates, which is expected if only a length was rounded."""
    text = f"the learning rate is {_numbers(step.rates)}, and {_numbers(expected.rates)} in the reference"
    pairs = list(zip(step.positions, expected.positions, strict=False))
    factors = {own / other for own, other in pairs if other}
    is_per_process = factors == {run.size}
    is_rounded = is_per_process and _are_close(step.rates, expected.rates, ROUNDED_RATE)
    if is_rounded:
        cause = (
            "A prepared scheduler steps once for each process, so a schedule over the batches of a loader is "
            "that of one process, up to the rounding of the number of batches."
        )
    elif is_per_process:
        cause = (
            f"The prepared scheduler has taken {run.size} steps for each step of the optimizer, one for each "
            "process. Write the schedule for the batches of one process, or pass "
            'step_scheduler_with_optimizer="per_update".'
        )
    else:
        cause = "The script makes the learning rate or the schedule depend on the number of processes."
    return Finding(number, "learning rate", text, cause, is_expected=is_rounded)


def _compare_samples(step: Step, expected: Step) -> tuple[str, str] | None:
    """Returns the difference of the samples of a step and its cause, or None."""
    counts = Counter(row for rows in step.samples.values() for row in rows)
    wanted = Counter(row for rows in expected.samples.values() for row in rows)
    if counts == wanted:
        return None
    extra, lacking = counts - wanted, wanted - counts
    if counts.total() != wanted.total():
        text = f"a step has {counts.total()} samples, and {wanted.total()} in the reference"
        cause = "The batch size or the number of micro-batches depends on the number of processes."
        return text, cause if counts else _UNPREPARED
    repeated = [row for row in extra if row in wanted]
    for group, rows in step.samples.items():
        again = list(dict.fromkeys(row for row in rows if row in repeated))
        if again and len(step.samples) > 1:
            text = f"data-parallel rank {group} read samples {_indices(again)} again"
            return f"{text}, and samples {_indices(lacking)} were not read", _SAMPLES_CAUSE
    text = f"samples {_indices(lacking)} were not read" if lacking else ""
    other = f"samples {_indices(extra)} were read in addition" if extra else ""
    return "; ".join(part for part in (text, other) if part), _SAMPLES_CAUSE


_SAMPLES_CAUSE = (
    "The loader was sharded twice (a DistributedSampler in addition to prepare), not prepared, or its order "
    "depends on the rank or the number of processes."
)


def _compare_contents(step: Step, expected: Step) -> tuple[str, str] | None:
    """Returns the difference of samples without an index and its cause, or None.

    Samples that are padded to other shapes cannot be compared.
    """
    counts = Counter(row for rows in step.samples.values() for row in rows)
    wanted = Counter(row for rows in expected.samples.values() for row in rows)
    shapes = [Counter(row.rpartition(" ")[0] for row in each.elements()) for each in (counts, wanted)]
    extra = counts - wanted
    if not extra or shapes[0] != shapes[1]:
        return None
    return (
        f"{extra.total()} of {counts.total()} samples have other values than those of the reference",
        "The script divides the stream in addition to prepare, or its order or its random numbers depend on "
        "the rank, the number of processes or the batch size.",
    )


def _indices(rows: Any) -> str:
    names = [row.rsplit("/", 1)[1] for row in sorted(rows, key=_by_number)]
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def _by_number(row: str) -> tuple[int, str]:
    name = row.rsplit("/", 1)[1]
    return (int(name), "") if name.isdigit() else (0, name)


def _compare_norms(
    number: int, step: Step, expected: Step, run: Run, tolerances: Tolerances
) -> Iterator[Finding]:
    norms = [norm for norm in step.norms if norm is not None]
    wanted = expected.norms[0]
    if not norms or wanted is None:
        return
    if not all(_is_close(norm, norms[0], tolerances.norm * norms[0]) for norm in norms):
        ranks = ", ".join(f"{norm:.6g} on rank {rank}" for rank, norm in enumerate(norms))
        cause = (
            "Gradients are not averaged over the ranks: call the prepared model, not its `module`, and "
            "accelerator.backward(loss). Ranks of LocalSGD and DiLoCo train separately, so one process is no "
            "reference for them."
        )
        yield Finding(number, "gradient norm", f"the gradient norm is {ranks}", cause)
        return
    if not _is_close(norms[0], wanted, tolerances.norm * abs(wanted) + 1e-12):
        text = f"the gradient norm is {norms[0]:.6g}, and {wanted:.6g} in the reference"
        yield Finding(number, "gradient norm", text, _cause_of_factor(norms[0], wanted, run, "gradient norm"))


_OF_GATHER = " A loss of tensors of gather() has this norm, too, because gather() passes no gradients."


def _cause_of_factor(value: float, wanted: float, run: Run, name: str) -> str:
    """Returns a cause for a value that is a multiple of the expected one."""
    if not wanted or not math.isfinite(value / wanted):
        return ""
    ratio = value / wanted
    for factor in sorted({run.num_groups, run.size} - {0, 1}):
        if abs(ratio - factor) < 1e-3 * factor:
            return (
                f"The {name} is {factor} times that of the reference: it is summed over ranks, not averaged."
            )
        if abs(ratio * factor - 1) < 1e-3:
            return (
                f"The {name} is 1/{factor} of that of the reference: it is divided by the number of "
                "processes in addition to the mean over ranks, or it is a sum over the batch of one rank. "
                "Pass the mean to backward, or count items with accumulate(num_items=...)."
                + (_OF_GATHER if name == "gradient norm" else "")
            )
    return ""


def _compare_weights(run: Run, reference: Run, tolerances: Tolerances) -> Iterator[Finding]:
    from safetensors.torch import load_file

    number = 0
    while (reference.folder / WEIGHTS_FILE.format("after", number)).exists():
        pairs = []
        for each in (run, reference):
            paths = [each.folder / WEIGHTS_FILE.format(moment, number) for moment in ("before", "after")]
            pairs.append([load_file(path) if path.exists() else {} for path in paths])
        rounded = {
            name.partition(":")[2]
            for name, size in reference.sizes.items()
            if size < tolerances.rounding and name.startswith(f"{number}:")
        }
        yield from _compare_model(number, pairs[0], pairs[1], tolerances, rounded)
        number += 1


def _compare_model(
    number: int,
    own: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
    tolerances: Tolerances,
    rounded: set[str],
) -> Iterator[Finding]:
    (before, after), (before_reference, after_reference) = own, reference
    prefix = f"model {number}, " if number else ""
    if not after:
        yield Finding(0, "weights", f"{prefix}this launch wrote no weights")
        return
    if lacking := after_reference.keys() ^ after.keys():
        text = f"{prefix}only one of the runs has {', '.join(sorted(lacking)[:MAX_SHOWN])}"
        yield Finding(0, "weights", text)
    total = math.sqrt(
        sum(
            float((after_reference[name] - before_reference[name]).double().square().sum())
            for name in after_reference
            if name in before_reference and after_reference[name].is_floating_point()
        )
    )
    differing = []
    for name, value in after_reference.items():
        if name not in after or name not in before or name not in before_reference:
            continue
        if after[name].shape != value.shape:
            yield Finding(
                0,
                "weights",
                f"{prefix}`{name}` has shape {tuple(after[name].shape)}, and {tuple(value.shape)}",
            )
            continue
        update = value.double() - before_reference[name].double()  # bool has no difference
        difference = (after[name].double() - before[name].double()) - update
        size, error = float(update.norm()), float(difference.norm())
        if not size and error > 1e-6 * max(total, 1e-12):
            text = f"{prefix}`{name}` was trained, and is not in the reference"
            yield Finding(0, "weights", text, "A frozen parameter is trained in this launch.")
        elif size and not error <= tolerances.update * size and name not in rounded:
            differing.append((error / size, name))
    yield from _report_differing(prefix, differing)


def _report_differing(prefix: str, differing: list[tuple[float, str]]) -> Iterator[Finding]:
    buffers = [entry for entry in differing if _is_buffer(entry[1])]
    weights = [entry for entry in differing if entry not in buffers]
    for kind, entries in (("weights", weights), ("buffers", buffers)):
        if not entries:
            continue
        error, name = entries[0]
        more = f", and {len(entries) - 1} more" if len(entries) > 1 else ""
        text = f"{prefix}the update of `{name.removeprefix(BUFFER)}` differs by {error:.2g} of it{more}"
        yield Finding(0, kind, text)


def _is_buffer(name: str) -> bool:
    return name.startswith(BUFFER) or name.rpartition(".")[2] in ("running_mean", "running_var")


def _is_close(own: float, expected: float, bound: float) -> bool:
    """Returns whether numbers differ by at most a bound, or are the same infinity, or both NaN."""
    if math.isfinite(own) and math.isfinite(expected):
        return abs(own - expected) <= bound
    return own == expected or (math.isnan(own) and math.isnan(expected))


def _are_close(own: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    return len(own) == len(expected) and all(
        _is_close(a, b, tolerance * max(abs(a), abs(b), 1e-30)) for a, b in zip(own, expected, strict=True)
    )


def _numbers(values: Sequence[float]) -> str:
    shown = [f"{value:.6g}" for value in values]
    return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
