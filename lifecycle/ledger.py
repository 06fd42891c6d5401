"""The page ledger: pool, fences and tenant accounts in one place, so that no path can free a page past its fence.

Every change of a page's state outside the pool's own tests goes through here. Pages are charged to the tenant that
allocated them until they are free again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.fences import Fences
from kvgate.lifecycle.pool import PageIds, PagePool, State

NO_PAGES: PageIds = np.zeros(0, np.int32)


class Ledger:
    """States, fences and owners of the pages of one pool.

    Attributes:
        pool: the page pool.
        fences: tickets in flight.
        tenant: int32 ``[total]``, account of each page; meaningless where the page is free.
        owned: bool ``[total]``, pages charged to an account: those that are not free.
        charged: int64 ``[accounts]``, pages of each account.
        kept: bool ``[total]``, pages a prefix cache wants back as CACHED instead of FREE.
        overdue: bool ``[total]``, quarantined pages whose launch has not signalled in time; freed once it does.
        given_up: bool ``[total]``, cached pages that wait for such a launch: not to be counted on.
    """

    def __init__(self, pool: PagePool, accounts: int = 1) -> None:
        self.pool = pool
        self.fences = Fences(pool.total)
        self.tenant: NDArray[np.int32] = np.zeros(pool.total, np.int32)
        self.owned: NDArray[np.bool_] = np.zeros(pool.total, np.bool_)
        self.charged: NDArray[np.int64] = np.zeros(accounts, np.int64)
        self.kept: NDArray[np.bool_] = np.zeros(pool.total, np.bool_)
        self.overdue: NDArray[np.bool_] = np.zeros(pool.total, np.bool_)
        self.given_up: NDArray[np.bool_] = np.zeros(pool.total, np.bool_)
        self.fenced = 0

    def alloc(self, count: int, account: int = 0) -> PageIds:
        """``count`` pages with one reference each, charged to ``account``. Raises OutOfPages, changing nothing."""
        ids = self.pool.alloc(count)
        self.claim(ids, account)
        return ids

    def claim(self, ids: PageIds, account: int) -> None:
        """Charge pages that somebody took from the pool directly (page tables do); those charged already stay so."""
        fresh = ids[~self.owned[ids]]
        self._account(account)
        self.tenant[fresh] = account
        self.owned[fresh] = True
        self.charged[account] += len(fresh)

    def reconcile(self) -> None:
        """Discharge pages that somebody gave back to the pool directly (page tables do, when they drop slots)."""
        self._discharge(np.flatnonzero(self.owned & (self.pool.state == State.FREE)).astype(np.int32))

    def alloc_split(self, counts: NDArray[np.int64], accounts: NDArray[np.int32]) -> PageIds:
        """Pages for several owners in one call: ``counts[i]`` of them charged to ``accounts[i]``, in that order."""
        ids = self.pool.alloc(int(counts.sum()))
        self._account(int(accounts.max(initial=0)))
        self.tenant[ids] = np.repeat(accounts, counts)
        self.owned[ids] = True
        np.add.at(self.charged, accounts, counts)
        return ids

    def share(self, ids: PageIds) -> None:
        """One more reference to each referenced page."""
        self.pool.incref(ids)

    def release(self, ids: PageIds, tickets: Iterable[int] = ()) -> PageIds:
        """Drop one reference of each page. Pages nobody references go to CACHED, FENCED or FREE; these are returned.

        Args:
            ids: pages, each once. A double free raises and changes nothing.
            tickets: launches that may still touch them; over or unknown ones do not matter.
        """
        return self.released(ids, self.pool.decref(ids, State.FENCED), tickets)

    def released(self, ids: PageIds, gone: PageIds, tickets: Iterable[int] = ()) -> PageIds:
        """The second half of :meth:`release`, for page tables that dropped the references of ``ids`` themselves.

        ``gone`` are those nobody references any more, now FENCED.
        """
        self.fenced += len(gone)
        self.fences.hold(ids, tickets)
        kept = gone[self.kept[gone]]
        if len(kept):
            self._leave_fence(kept, State.CACHED)
        idle = gone[(self.fences.busy[gone] == 0) & ~self.kept[gone]]
        if len(idle):
            self._leave_fence(idle, State.FREE)
        return gone

    def take_cached(self, ids: PageIds) -> None:
        """Reference pages found in the prefix cache, whether somebody else references them or not."""
        cached = self.pool.state[ids] == State.CACHED
        self.pool.incref(ids[~cached])
        self.pool.move(ids[cached], State.CACHED, State.REFERENCED)

    def drop_cached(self, ids: PageIds) -> int:
        """The prefix cache forgets these pages; returns how many became free at once.

        Referenced ones are freed with their last reference, busy ones when their fence is over.
        """
        self.kept[ids] = False
        cached = ids[self.pool.state[ids] == State.CACHED]
        self.pool.move(cached, State.CACHED, State.FENCED)
        self.fenced += len(cached)
        idle = cached[self.fences.busy[cached] == 0]
        self._leave_fence(idle, State.FREE)
        return len(idle)

    def signal(self, ticket: int) -> int:
        """A launch is over; returns the pages that became free."""
        return self._settle(self.fences.signal(ticket))

    def expire(self, now: float) -> int:
        """Give up launches past their deadline; returns the pages that became free."""
        return self._settle(self.fences.expire(now))

    def set_aside_late(self, now: float, patience: float) -> int:
        """Quarantine pages whose launch has not signalled for ``patience``; returns how many that are.

        Nobody may count on them any more. They are freed by the signal, or by the deadline of their launch.
        """
        late = self.fences.late(now, patience)
        if not late:
            return 0
        ids = np.unique(np.concatenate(late)).astype(np.int32)
        fenced = ids[self.pool.state[ids] == State.FENCED]
        self._leave_fence(fenced, State.QUARANTINED)
        self.overdue[fenced] = True
        self.given_up[ids[self.pool.state[ids] == State.CACHED]] = True
        return len(fenced)

    def waiting_cached(self) -> PageIds:
        """Cached pages that a launch may still touch: evicting them frees nothing yet."""
        if not len(self.fences):
            return NO_PAGES
        ids = self.fences.held()
        return np.unique(ids[self.pool.state[ids] == State.CACHED])

    def quarantine(self, ids: PageIds, tickets: Iterable[int] = ()) -> None:
        """Set aside referenced pages without an owner; :meth:`return_quarantined` frees them after their fences."""
        self.pool.quarantine(ids)
        self.kept[ids] = False
        self.fences.hold(ids, tickets)

    def return_quarantined(self) -> PageIds:
        """Free the quarantined pages that no launch may touch any more; returns them."""
        ids = np.flatnonzero((self.pool.state == State.QUARANTINED) & (self.fences.busy == 0)).astype(np.int32)
        self.overdue[ids] = False
        self.pool.move(ids, State.QUARANTINED, State.FREE)
        self._discharge(ids)
        return ids

    def check(self) -> None:
        """Raise AssertionError unless states, fences and accounts agree and nothing waits without a reason."""
        self.pool.check()
        self.fences.check()
        state = self.pool.state
        taken = state != State.FREE
        assert (taken == self.owned).all(), "a page is charged and free, or taken and charged to nobody"
        found = np.bincount(self.tenant[taken], minlength=len(self.charged))
        assert (found == self.charged).all(), f"tenant accounts {self.charged.tolist()} hold {found.tolist()} pages"
        assert self.fenced == int((state == State.FENCED).sum()), "the count of fenced pages is wrong"
        assert (self.fences.busy[state == State.FENCED] > 0).all(), "a fenced page waits for nothing"
        assert (self.fences.busy[state == State.FREE] == 0).all(), "a free page may still be touched"
        assert (state[self.overdue] == State.QUARANTINED).all(), "an overdue page is not set aside"
        assert not (self.kept & ((state == State.FREE) | (state == State.FENCED))).any(), "a cached page was freed"

    def _settle(self, idle: PageIds) -> int:
        done = idle[self.pool.state[idle] == State.FENCED]
        self._leave_fence(done, State.FREE)
        self.given_up[idle] = False
        late = idle[self.overdue[idle]]
        if len(late):
            self.overdue[late] = False
            self.pool.move(late, State.QUARANTINED, State.FREE)
            self._discharge(late)
        return len(done) + len(late)

    def _leave_fence(self, ids: PageIds, target: State) -> None:
        self.pool.move(ids, State.FENCED, target)
        self.fenced -= len(ids)
        if target == State.FREE:
            self._discharge(ids)

    def _discharge(self, ids: PageIds) -> None:
        self.owned[ids] = False
        self.charged -= np.bincount(self.tenant[ids], minlength=len(self.charged))

    def _account(self, account: int) -> None:
        if account >= len(self.charged):
            self.charged = np.pad(self.charged, (0, account + 1 - len(self.charged)))
