"""The audit: every page accounted for, orphans found and set aside, never guessed and never clamped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.pool import PageIds, State


@dataclass(frozen=True)
class Finding:
    """What an audit saw.

    Attributes:
        states: pages in each state, by name; they sum to the total.
        orphans: pages with references although nobody claims any: set aside in the repair.
        miscounted: claimed pages whose reference count differs from the claims. A bug: reported, never repaired.
    """

    states: dict[str, int]
    orphans: PageIds
    miscounted: PageIds

    @property
    def clean(self) -> bool:
        """Nothing is wrong."""
        return len(self.orphans) == 0 and len(self.miscounted) == 0


def claims(total: int, held: Iterable[PageIds]) -> NDArray[np.int64]:
    """References each page should have, int64 ``[total]``, from the pages each owner holds."""
    counted = np.zeros(total, np.int64)
    for ids in held:
        np.add.at(counted, ids, 1)
    return counted


def inspect(ledger: Ledger, claimed: NDArray[np.int64]) -> Finding:
    """Compare the pool with what the owners claim. Changes nothing; safe in production between two rounds."""
    pool = ledger.pool
    counts = pool.counts()
    assert sum(counts.values()) == pool.total, "states do not sum to the total"
    referenced = pool.state == State.REFERENCED
    orphans = np.flatnonzero(referenced & (claimed == 0)).astype(np.int32)
    wrong = np.flatnonzero((claimed > 0) & (claimed != pool.ref)).astype(np.int32)
    return Finding({s.name.lower(): n for s, n in counts.items()}, orphans, wrong)


def repair(ledger: Ledger, finding: Finding, tickets: Iterable[int] = ()) -> PageIds:
    """Quarantine the orphans until the launches in ``tickets`` are over, and return what earlier repairs set aside.

    Returns the pages given back to the free list. Miscounted pages stay as they are: those need a person.
    """
    if len(finding.orphans):
        ledger.quarantine(finding.orphans, tickets)
    return ledger.return_quarantined()
