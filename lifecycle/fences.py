"""Fences: pages stay out of reuse until the last kernel or copy that may touch them has signalled.

A ticket stands for one launch on one stream (a kernel batch, a swap copy, an export). Streams signal in any order.
Whoever gives up pages names the tickets that may still touch them; until each of these signalled, or ran past its
deadline, the pages are busy. A signal after the deadline, or a second one, is a no-op: the ticket is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.pool import PageIds


@dataclass
class _Ticket:
    stream: str
    deadline: float
    since: float | None
    holds: list[_Hold] = field(default_factory=list)


@dataclass
class _Hold:
    ids: PageIds
    waiting: set[int]
    named: bool = False


class Fences:
    """Outstanding tickets and the pages they keep busy.

    Attributes:
        busy: int32 ``[pages]``, holds on each page; only pages with 0 may be reused.
        expired: tickets given up at their deadline so far. overdue: times that one took too long while pages waited.
    """

    def __init__(self, pages: int) -> None:
        self.busy: NDArray[np.int32] = np.zeros(pages, np.int32)
        self.expired = 0
        self.overdue = 0
        self._tickets: dict[int, _Ticket] = {}
        self._next = 1

    def launch(self, stream: str, deadline: float, now: float | None = None) -> int:
        """A ticket for work just launched on ``stream``; given up at clock time ``deadline``.

        Without ``now`` its age counts from the first :meth:`late` that sees it.
        """
        ticket = self._next
        self._next += 1
        self._tickets[ticket] = _Ticket(stream, deadline, now)
        return ticket

    def tickets(self) -> list[int]:
        """All outstanding tickets."""
        return list(self._tickets)

    def outstanding(self, tickets: Iterable[int]) -> list[int]:
        """Those of ``tickets`` that have neither signalled nor expired."""
        return [t for t in tickets if t in self._tickets]

    def hold(self, ids: PageIds, tickets: Iterable[int]) -> None:
        """Keep ``ids`` busy until every outstanding one of ``tickets`` is over."""
        waiting = set(self.outstanding(tickets))
        if not waiting or len(ids) == 0:
            return
        hold = _Hold(ids, waiting)
        self.busy[ids] += 1
        for ticket in waiting:
            self._tickets[ticket].holds.append(hold)

    def signal(self, ticket: int) -> PageIds:
        """The work is done; returns pages that are no longer busy. A late or second signal returns none."""
        found = self._tickets.pop(ticket, None)
        freed = []
        for hold in found.holds if found else []:
            hold.waiting.discard(ticket)
            if not hold.waiting:
                self.busy[hold.ids] -= 1
                freed.append(hold.ids[self.busy[hold.ids] == 0])
        return np.unique(np.concatenate(freed)) if freed else np.zeros(0, np.int32)

    def expire(self, now: float) -> PageIds:
        """Give up every ticket whose deadline has passed; returns pages that are no longer busy."""
        late = [t for t, entry in self._tickets.items() if entry.deadline <= now]
        self.expired += len(late)
        return np.unique(np.concatenate([np.zeros(0, np.int32), *(self.signal(t) for t in late)]))

    def late(self, now: float, patience: float) -> list[PageIds]:
        """Pages that wait for launches which have run for ``patience`` or longer; each hold is named once."""
        found = []
        for entry in self._tickets.values():
            if entry.since is None:
                entry.since = now
            if now - entry.since < patience:
                continue
            fresh = [hold for hold in entry.holds if not hold.named]
            self.overdue += bool(fresh)
            for hold in fresh:
                hold.named = True
                found.append(hold.ids)
        return found

    def held(self) -> PageIds:
        """All busy pages, each at least once."""
        return np.concatenate([np.zeros(0, np.int32), *(h.ids for t in self._tickets.values() for h in t.holds)])

    def __len__(self) -> int:
        return len(self._tickets)

    def check(self) -> None:
        """Raise AssertionError unless ``busy`` is exactly the sum of the holds."""
        holds = {id(h): h for t in self._tickets.values() for h in t.holds}
        found = np.zeros_like(self.busy)
        for hold in holds.values():
            assert hold.waiting, "a hold without a ticket"
            found[hold.ids] += 1
        assert (found == self.busy).all(), "busy pages and holds disagree"
