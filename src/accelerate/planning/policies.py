"""Choice of the policy of activation checkpointing whose activations fit in a budget.

`strategies/recomputation.py` chooses for the first training batch of a model, `plan_memory` for its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate.plugins import ActivationCheckpointing

Policy = ActivationCheckpointing | None
"""What is recomputed, where None recomputes nothing."""


def policies_for(num_blocks: int, blocks: Sequence[str] | None) -> list[Policy]:
    """Returns the policies for a number of blocks, in the order in which they are tried.

    They recompute nothing, all but matrix products and attention, and one block up to all blocks. Of the
    intervals that recompute the same number of blocks, the smallest is used.
    """
    if not num_blocks:
        return [None]
    intervals: dict[int, int] = {}  # number of blocks that are recomputed -> interval
    for every in range(num_blocks, 0, -1):
        intervals[-(-num_blocks // every)] = every
    by_operator = ActivationCheckpointing(blocks=blocks, save_operators="matmul")
    by_block = [ActivationCheckpointing(every, blocks) for every in intervals.values()]
    return [None, by_operator, *by_block]


def choose_policy(
    policies: Sequence[Policy], bytes_of: Callable[[Policy], float], budget: float
) -> tuple[int, float]:
    """Returns the index of the first policy that fits, and the smallest bytes of all tried policies.

    Policies after the second one recompute more and more blocks, so that half of them are skipped after each
    try. The index is the number of policies if none fits.

    Args:
        policies: The policies, as `policies_for` returns them.
        bytes_of: Returns the bytes of the activations under a policy.
        budget: Largest number of bytes.
    """
    sizes: list[float] = []

    def fits(index: int) -> bool:
        sizes.append(bytes_of(policies[index]))
        return sizes[-1] <= budget

    for index in range(min(2, len(policies))):
        if fits(index):
            return index, min(sizes)
    low, high = 2, len(policies)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return min(low, len(policies)), min(sizes)
