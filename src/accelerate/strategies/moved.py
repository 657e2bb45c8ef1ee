"""Parameters that have taken the places of others: found by identity, without keeping the old ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Moved(WeakIdKeyDictionary):
    """Maps an old parameter, while somebody holds it, to the one that has taken its place.

    A copy or a pickle holds the same pairs; an old parameter stays in it where something else that is pickled
    with it, such as an optimizer, holds that too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.pairs(),)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each old parameter with its new one."""
        return list(self.items())  # type: ignore[no-untyped-call]


def _rebuild(pairs: list[tuple[Tensor, Tensor]]) -> Moved:
    moved = Moved()
    for old, new in pairs:
        moved[old] = new
    return moved
