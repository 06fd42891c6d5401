"""What the manager needs from whoever holds the pages: an interface in whole blocks, and the plain implementation.

A block is ``page_size`` tokens over all layers and kv heads. The engine implements :class:`Store` over its page tables;
:class:`FlatStore` keeps one row of page ids per request and serves the simulator and the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.audit import Finding, claims, inspect, repair
from kvgate.lifecycle.ledger import NO_PAGES, Ledger
from kvgate.lifecycle.pool import PageIds, PagePool, State

Slots = NDArray[np.int64]


class Store(Protocol):
    """Effects the manager asks for. Slots are the manager's; all numbers are blocks."""

    @property
    def total(self) -> int:
        """Blocks of the device pool."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's native window; empty where no layer has one."""

    def available(self) -> int:
        """Blocks that could be handed out now, cached ones that evicting would free at once included."""

    def soon(self) -> int:
        """Blocks that come free as soon as launches in flight are over."""

    def host_free(self) -> int:
        """Blocks the host area could take."""

    def begin(self, slot: int, known: int, *, shared: bool = True) -> tuple[int, int]:
        """A request without pages starts. Pins what is cached of its first ``known - 1`` tokens, if it is to share.

        Returns the blocks that gives it and the tokens they cover.
        """

    def grow(self, slots: Slots, blocks: NDArray[np.int64], accounts: NDArray[np.int32]) -> None:
        """Hand ``blocks[i]`` more blocks to each slot: all of it, or OutOfPages and nothing."""

    def exclusive(self, slots: Slots) -> NDArray[np.int64]:
        """Blocks of each slot that would come free at once if it were released."""

    def release(self, slot: int, tickets: Iterable[int]) -> int:
        """Take all device blocks of a slot; ``tickets`` may still touch them. Returns blocks that lost their owner."""

    def shrink(self, slot: int, blocks: int, tickets: Iterable[int]) -> int:
        """Keep only ``blocks`` blocks of a slot (its gated policy evicted the rest); returns blocks given up."""

    def swap_out(self, slot: int, tickets: Iterable[int]) -> bool:
        """Move all blocks to the host, or leave everything as it is and return False."""

    def swap_in(self, slot: int, account: int) -> int:
        """Bring a swapped slot back; returns its blocks, or 0 if its payload is lost: then it is recomputed."""

    def drop_host(self, slot: int) -> None:
        """Forget a swapped slot's host copy."""

    def launch(self, now: float, deadline: float) -> int:
        """A ticket for the round about to run."""

    def signal(self, ticket: int) -> None:
        """The launch is over."""

    def expire(self, now: float, patience: float) -> int:
        """Give up launches past their deadline, forget what has lived its time, and set pages aside whose launch has
        not signalled for ``patience``; returns how many pages were set aside."""

    def charged(self, account: int) -> int:
        """Pages charged to an account."""

    def repair(self) -> Finding:
        """Audit: set orphans aside, give back those of earlier audits; returns what was found."""


class FlatStore:
    """One page a block, page ids in a row per slot; host blocks are only counted."""

    def __init__(self, blocks: int, host_blocks: int = 0) -> None:
        self.windows: tuple[int | None, ...] = ()
        self.ledger = Ledger(PagePool(blocks))
        self.pages: NDArray[np.int32] = np.zeros((64, 64), np.int32)
        self.counts: NDArray[np.int64] = np.zeros(64, np.int64)
        self.host_total = host_blocks
        self.host: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self.ledger.pool.total

    def available(self) -> int:
        """Free pages."""
        return self.ledger.pool.free

    def soon(self) -> int:
        """Fenced pages."""
        return self.ledger.fenced

    def host_free(self) -> int:
        """Host blocks not taken."""
        return self.host_total - sum(self.host.values())

    def held(self, slot: int) -> PageIds:
        """Pages of one slot, in order."""
        if slot >= len(self.counts):
            return NO_PAGES
        return self.pages[slot, : self.counts[slot]]

    def begin(self, slot: int, known: int, *, shared: bool = True) -> tuple[int, int]:
        """Nothing is cached."""
        return 0, 0

    def grow(self, slots: Slots, blocks: NDArray[np.int64], accounts: NDArray[np.int32]) -> None:
        """Append pages to each slot's row. Raises OutOfPages with nothing changed."""
        if len(slots) == 0:
            return
        ids = self.ledger.alloc_split(blocks, accounts)
        self._fit(int(slots.max()), 0)
        self._fit(0, int((self.counts[slots] + blocks).max()))
        rows = np.repeat(slots, blocks)
        starts = np.repeat(np.cumsum(blocks) - blocks, blocks)
        columns = np.repeat(self.counts[slots], blocks) + np.arange(len(ids)) - starts
        self.pages[rows, columns] = ids
        self.counts[slots] += blocks

    def exclusive(self, slots: Slots) -> NDArray[np.int64]:
        """Pages with one reference that no launch may touch, per slot."""
        width = int(self.counts[slots].max(initial=0))
        pages = self.pages[slots, :width]
        ledger = self.ledger
        alone = (ledger.pool.ref[pages] == 1) & (ledger.fences.busy[pages] == 0)
        counted: NDArray[np.int64] = (alone & (np.arange(width) < self.counts[slots][:, None])).sum(1)
        return counted

    def release(self, slot: int, tickets: Iterable[int]) -> int:
        """Give up the whole row."""
        ids = self.held(slot).copy()
        if len(ids):
            self.counts[slot] = 0
            self.ledger.release(ids, tickets)
        return len(ids)

    def shrink(self, slot: int, blocks: int, tickets: Iterable[int]) -> int:
        """Give up the row beyond ``blocks``."""
        extra = self.held(slot)[blocks:].copy()
        if len(extra):
            self.counts[slot] = blocks
            self.ledger.release(extra, tickets)
        return len(extra)

    def swap_out(self, slot: int, tickets: Iterable[int]) -> bool:
        """Count the row on the host instead; the source stays fenced by ``tickets``."""
        size = int(self.counts[slot])
        if size > self.host_free():
            return False
        self.host[slot] = size
        self.release(slot, tickets)
        return True

    def swap_in(self, slot: int, account: int) -> int:
        """Take a row of the same length again."""
        size = self.host[slot]
        self.grow(np.array([slot]), np.array([size]), np.array([account], np.int32))
        del self.host[slot]
        return size

    def drop_host(self, slot: int) -> None:
        """Forget the host copy."""
        self.host.pop(slot, None)

    def launch(self, now: float, deadline: float) -> int:
        """A compute ticket."""
        return self.ledger.fences.launch("compute", deadline, now)

    def signal(self, ticket: int) -> None:
        """The launch is over."""
        self.ledger.signal(ticket)

    def expire(self, now: float, patience: float = np.inf) -> int:
        """Give up launches past their deadline, set aside what waits for late ones."""
        self.ledger.expire(now)
        return self.ledger.set_aside_late(now, patience)

    def charged(self, account: int) -> int:
        """Pages charged to an account."""
        return int(self.ledger.charged[account]) if account < len(self.ledger.charged) else 0

    def repair(self) -> Finding:
        """Audit the rows."""
        rows = [self.held(int(s)) for s in np.flatnonzero(self.counts)]
        finding = inspect(self.ledger, claims(self.total, rows))
        repair(self.ledger, finding, self.ledger.fences.tickets())
        return finding

    def check(self) -> None:
        """Raise AssertionError unless the rows hold exactly the references the pool counts."""
        self.ledger.check()
        held = np.concatenate([NO_PAGES, *(self.held(int(s)) for s in np.flatnonzero(self.counts))])
        found = np.bincount(held, minlength=self.total)
        pool = self.ledger.pool
        assert (found == pool.ref).all(), "rows and reference counts disagree"
        assert sum(pool.counts().values()) == self.total, "states do not sum to the total"
        assert pool.counts()[State.QUARANTINED] == 0 or found.sum() <= self.total, "more references than pages"
        assert self.host_free() >= 0, "more on the host than it holds"

    def _fit(self, slot: int, width: int) -> None:
        rows, columns = self.pages.shape
        more_rows = max(0, max(slot + 1, 2 * rows) - rows) if slot >= rows else 0
        more_columns = max(0, max(width, 2 * columns) - columns) if width > columns else 0
        if more_rows or more_columns:
            self.pages = np.pad(self.pages, ((0, more_rows), (0, more_columns)))
            self.counts = np.pad(self.counts, (0, more_rows))
