"""Whether what somebody looks at is the beginning of the order that was drawn before the run."""

from __future__ import annotations

from collections.abc import Sequence

from kvgate.evals.data.items import digest


def order_hashes(rounds: Sequence[Sequence[str]]) -> list[str]:
    """After every round, a hash of all item hashes up to there, chained item by item."""
    found, last = list[str](), ""
    for hashes in rounds:
        for item_hash in hashes:
            last = digest([last, item_hash])
        found.append(last)
    return found


def follows(item_hashes: Sequence[str], order: Sequence[str], looks: int) -> bool:
    """Whether the items are the first ``looks`` rounds of the order, each item where it was drawn."""
    return 0 < looks <= len(order) and order_hashes([item_hashes]) == [order[looks - 1]]
