"""The choice of a policy of activation checkpointing by a budget."""

from __future__ import annotations

import pytest

from accelerate.planning import Policy, choose_policy, policies_for
from accelerate.plugins import ActivationCheckpointing

FULL, BY_OPERATOR, BLOCK, OUTSIDE = 100.0, 40.0, 5.0, 1000.0


def bytes_of(policy: Policy, num_blocks: int) -> float:
    """Bytes of a model whose blocks are equal."""
    if policy is None:
        return OUTSIDE + num_blocks * FULL
    if policy.save_operators:
        return OUTSIDE + num_blocks * BY_OPERATOR
    recomputed = len(range(0, num_blocks, policy.every))
    return OUTSIDE + (num_blocks - recomputed) * FULL + recomputed * BLOCK


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 12, 32])
def test_policies_recompute_more_and_more_blocks(num_blocks: int) -> None:
    policies = policies_for(num_blocks, ["Layer"])
    assert policies[0] is None
    assert policies[1] == ActivationCheckpointing(blocks=["Layer"], save_operators="matmul")
    assert policies[-1] == ActivationCheckpointing(blocks=["Layer"])
    counts = [len(range(0, num_blocks, policy.every)) for policy in policies[2:] if policy]
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == num_blocks


def test_without_blocks_nothing_is_recomputed() -> None:
    assert policies_for(0, None) == [None]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 12, 32])
def test_the_first_policy_that_fits_is_chosen(num_blocks: int) -> None:
    policies = policies_for(num_blocks, None)
    sizes = [bytes_of(policy, num_blocks) for policy in policies]
    for budget in {size + more for size in sizes for more in (-1, 0, 1)}:
        tried: list[Policy] = []

        def measure(policy: Policy) -> float:
            tried.append(policy)  # noqa: B023
            return bytes_of(policy, num_blocks)

        index, smallest = choose_policy(policies, measure, budget)
        fitting = [position for position, size in enumerate(sizes) if size <= budget]
        assert index == min(fitting, default=len(policies))
        assert smallest == min(bytes_of(policy, num_blocks) for policy in tried)
        assert len(tried) <= 2 + (len(policies) - 2).bit_length()


def test_a_model_without_blocks_fits_or_not() -> None:
    assert choose_policy([None], lambda policy: 5.0, 5.0) == (0, 5.0)
    assert choose_policy([None], lambda policy: 5.0, 4.0) == (1, 5.0)
