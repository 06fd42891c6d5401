"""The page pool: who holds a page, and in which of five states it is.

Everything is vectorised over page ids (int32 arrays); a call either succeeds for all its ids or raises and changes
nothing. The pool knows no tensors: a page id is an index into whatever the engine keeps its keys and values in.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]


class State(IntEnum):
    """Every page is in exactly one of these; the five counts always sum to the total."""

    FREE = 0
    CACHED = 1  # nobody references it; its content is kept for prefix hits
    REFERENCED = 2
    FENCED = 3  # nobody references it, but a kernel in flight may still touch it
    QUARANTINED = 4  # found without an owner by the audit


class PageError(Exception):
    """A caller broke the pool's rules; nothing was changed."""


class OutOfPages(PageError):
    """Fewer pages are free than were asked for."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} free")
        self.wanted = wanted
        self.free = free


class DuplicateIds(PageError):
    """One call names a page twice."""


class WrongState(PageError):
    """A page is not in the state the operation needs: a double free, or use after free."""


class PagePool:
    """Reference counts and states of ``total`` pages.

    Attributes:
        ref: int32 ``[total]``, references held by sequences.
        state: uint8 ``[total]``, a :class:`State` each.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"pool size {total}: needs at least one page")
        self.total = total
        self.ref = np.zeros(total, np.int32)
        self.state = np.full(total, State.FREE, np.uint8)
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)  # the top is its end: low ids go out first
        self._free = total
        self._scratch = np.zeros(total, np.int64)

    @property
    def free(self) -> int:
        """Pages that :meth:`alloc` could hand out now."""
        return self._free

    def alloc(self, count: int) -> PageIds:
        """``count`` pages with one reference each, all or nothing. Raises OutOfPages."""
        if count < 0:
            raise PageError(f"alloc of {count} pages")
        if count > self._free:
            raise OutOfPages(count, self._free)
        ids = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self.ref[ids] = 1
        self.state[ids] = State.REFERENCED
        return ids

    def incref(self, ids: PageIds) -> None:
        """One more reference for each page. Raises WrongState unless all are referenced."""
        self._require(ids, State.REFERENCED)
        self.ref[ids] += 1

    def decref(self, ids: PageIds, into: State = State.FREE) -> PageIds:
        """Drop one reference of each page; those that reach zero go ``into`` FREE, FENCED or CACHED and are returned.

        Raises WrongState on a page nobody references (a double free), DuplicateIds on a page named twice.
        """
        if into not in (State.FREE, State.FENCED, State.CACHED):
            raise PageError(f"a page without references cannot become {into.name}")
        self._require(ids, State.REFERENCED)
        self.ref[ids] -= 1
        released: PageIds = ids[self.ref[ids] == 0]
        self.state[released] = into
        if into == State.FREE:
            self._push(released)
        return released

    def drop_references(self, ids: PageIds) -> None:
        """Drop one reference for each occurrence of a page in ``ids``; those that reach zero become free.

        For copy-on-write, where several sequences leave one page in one step. Raises WrongState on an underflow.
        """
        drops = np.bincount(ids, minlength=self.total).astype(np.int32)
        if (drops > self.ref).any():
            raise WrongState(f"page {int(np.argmax(drops > self.ref))} has fewer references than would be dropped")
        self.ref -= drops
        gone = np.flatnonzero((drops > 0) & (self.ref == 0)).astype(np.int32)
        self.state[gone] = State.FREE
        self._push(gone)

    def move(self, ids: PageIds, source: State, target: State) -> None:
        """Take unreferenced pages from one state to another (a fence signalled, a cached page reused, an orphan found).

        Into REFERENCED the pages get one reference. Out of REFERENCED only :meth:`decref` and :meth:`quarantine` lead.
        """
        if source in (State.REFERENCED, target):
            raise PageError(f"no move from {source.name} to {target.name}")
        self._require(ids, source)
        if source == State.FREE:
            self._unpush(ids)
        self.state[ids] = target
        if target == State.FREE:
            self._push(ids)
        elif target == State.REFERENCED:
            self.ref[ids] = 1

    def quarantine(self, ids: PageIds) -> None:
        """Set aside referenced pages whose owner is gone, whatever their count says."""
        self._require(ids, State.REFERENCED)
        self.ref[ids] = 0
        self.state[ids] = State.QUARANTINED

    def counts(self) -> dict[State, int]:
        """Pages in each state."""
        found = np.bincount(self.state, minlength=len(State))
        return {state: int(found[state]) for state in State}

    def check(self) -> None:
        """Raise AssertionError if states, counts and the free list disagree."""
        listed = self._stack[: self._free]
        assert len(np.unique(listed)) == self._free, "a page stands twice in the free list"
        assert (self.state[listed] == State.FREE).all(), "the free list holds a page that is not free"
        assert self.counts()[State.FREE] == self._free, "a free page is missing from the free list"
        assert (self.ref >= 0).all(), "negative reference count"
        assert ((self.ref > 0) == (self.state == State.REFERENCED)).all(), "state and reference count disagree"

    def _require(self, ids: PageIds, state: State) -> None:
        if len(ids) == 0:
            return
        if ids.min() < 0 or ids.max() >= self.total:
            raise PageError(f"page id out of range: {ids.min()}..{ids.max()} of {self.total} pages")
        order = np.arange(len(ids))
        self._scratch[ids] = order
        if (self._scratch[ids] != order).any():
            raise DuplicateIds(f"page {ids[self._scratch[ids] != order][0]} is named twice in one call")
        wrong = self.state[ids] != state
        if wrong.any():
            page = int(ids[wrong][0])
            raise WrongState(f"page {page} is {State(self.state[page]).name}, not {state.name}")

    def _push(self, ids: PageIds) -> None:
        self._stack[self._free : self._free + len(ids)] = ids[::-1]
        self._free += len(ids)

    def _unpush(self, ids: PageIds) -> None:
        """Take named pages out of the free list; linear in the list, for rare repairs only."""
        listed = self._stack[: self._free]
        rest = listed[~np.isin(listed, ids)]
        self._stack[: len(rest)] = rest
        self._free = len(rest)
