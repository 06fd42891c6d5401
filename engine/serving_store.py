"""The manager's store over the engine's page tables, with prefix cache and host swap area.

The manager counts whole blocks (``page_size`` tokens over all layers and kv heads); the tables take pages only when
tokens are appended. What was promised and not yet taken is subtracted from what is available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvgate.compressors.policy import Policy
from kvgate.engine import prefix, swap
from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence
from kvgate.engine.served import Served
from kvgate.lifecycle.audit import Finding, claims, inspect, repair
from kvgate.lifecycle.ledger import NO_PAGES, Ledger
from kvgate.lifecycle.pool import OutOfPages, PageIds, State
from kvgate.lifecycle.prefix.cache import Hold, PrefixCache, Tokens
from kvgate.lifecycle.prefix.keys import Namespace
from kvgate.lifecycle.prefix.policies import RetentionPolicy
from kvgate.lifecycle.store import Slots
from kvgate.lifecycle.swap.area import HostArea

_NOBODY = 0  # account that shadows are charged to: no tenant asked for them


class EngineStore:
    """Implements :class:`kvgate.lifecycle.store.Store`.

    Args:
        engine: whose tables hold the pages. served: the request in a slot. clock: for retention policies.
        retention: None for no prefix cache. area: None for no swapping.
    """

    def __init__(
        self,
        engine: Engine,
        served: Callable[[int], Served],
        clock: Callable[[], float],
        retention: RetentionPolicy | None,
        area: HostArea | None,
    ) -> None:
        self.engine = engine
        self.ledger = Ledger(engine.tables.pool)
        size = engine.tables.geometry.page_size
        self.cache = PrefixCache(self.ledger, retention, size, clock) if retention is not None else None
        self.area = area
        self.rows: dict[int, Sequence] = {}
        self._served = served
        self._holds: dict[int, Hold] = {}
        self._promised: dict[int, int] = {}
        self._heads = engine.tables.geometry.heads
        self._host_blocks: dict[int, int] = {}
        self._parked: dict[int, Sequence] = {}
        self.shadows: list[Sequence] = []

    @property
    def total(self) -> int:
        """Whole blocks of the pool."""
        return self.engine.tables.pool.total // self._heads

    def available(self) -> int:
        """Free blocks not promised to anybody, and blocks the prefix cache would give up."""
        cached = self.cache.evictable if self.cache is not None else 0
        return (self.engine.tables.pool.free - self._owed()) // self._heads + cached

    def soon(self) -> int:
        """Fenced blocks."""
        return self.ledger.fenced // self._heads

    def host_free(self) -> int:
        """Blocks the host area could take, counting a little for tables beside the payload."""
        if self.area is None:
            return 0
        return self.area.free // (self._heads * (self.engine.store.page_bytes + 64) + 64)

    def begin(self, slot: int, known: int) -> tuple[int, int]:
        """Look the known tokens up, all but the last, which has to be computed."""
        served = self._served(slot)
        hold = Hold(Namespace(served.spec.model_version, served.spec.tenant, served.adapter))
        if self.cache is not None and not served.from_scratch:
            hold = self.cache.lookup(hold.space, served.known()[: known - 1])
        self._holds[slot] = hold
        self.rows[slot] = prefix.start(self.engine, self.ledger, hold, served.needs)
        self._promised[slot] = hold.blocks
        served.hit += hold.tokens
        return hold.blocks, hold.tokens

    def grow(self, slots: Slots, blocks: NDArray[np.int64], accounts: NDArray[np.int16]) -> None:
        """Promise blocks; makes room in the prefix cache. Raises OutOfPages with nothing promised."""
        self._make_room(int(blocks.sum()))
        for slot, more in zip(slots.tolist(), blocks.tolist(), strict=True):
            self._promised[slot] += more

    def exclusive(self, slots: Slots) -> NDArray[np.int64]:
        """Blocks whose every reference is the slot's own, and that no launch may touch."""
        return np.array([self._exclusive(int(s)) for s in slots], np.int64)

    def release(self, slot: int, tickets: Iterable[int]) -> int:
        """Give back the slot's table, its hold on the prefix cache and its promises."""
        row = self.rows.pop(slot, None)
        given = self._promised.pop(slot, 0)
        if row is not None:
            self._release_row(row, tuple(tickets))
        hold = self._holds.pop(slot, None)
        if hold is not None and self.cache is not None:
            self.cache.release(hold, tuple(tickets))
        return given

    def shrink(self, slot: int, blocks: int, tickets: Iterable[int]) -> int:
        """Take promises back. Pages themselves are dropped by the row's policy."""
        given = max(0, self._promised[slot] - blocks)
        self._promised[slot] -= given
        return given

    def swap_out(self, slot: int, tickets: Iterable[int]) -> bool:
        """Copy everything the row holds to the host area, then release it; never the other way round."""
        row = self.rows[slot]
        if self.area is None:
            return False
        payload = swap.pack(self.engine, row.id, row.length)
        key = self._key(slot)
        if not self.area.reserve(key, len(payload)):
            return False
        self.area.put(key, payload)
        self._host_blocks[slot] = self._held(row)
        self.release(slot, tickets)
        self._parked[slot] = row
        return True

    def swap_in(self, slot: int, account: int) -> int:
        """Bring the row back into fresh pages; 0 where its payload cannot be trusted any more."""
        assert self.area is not None, "nothing was ever swapped out"
        row = self._parked.pop(slot)
        blocks = self._host_blocks.pop(slot)
        payload = self.area.get(self._key(slot))
        if payload is None:
            return 0
        self._make_room(-(-swap.pages_in(payload) // self._heads))
        row.id, length = swap.unpack(self.engine, self.ledger, payload, account)
        assert length == row.length, "another sequence came back"
        row.released = False
        self.area.drop(self._key(slot))
        self.rows[slot] = row
        self._promised[slot] = blocks
        served = self._served(slot)
        self._holds[slot] = Hold(Namespace(served.spec.model_version, served.spec.tenant, served.adapter))
        return blocks

    def drop_host(self, slot: int) -> None:
        """Forget a swapped row."""
        self._parked.pop(slot, None)
        self._host_blocks.pop(slot, None)
        if self.area is not None:
            self.area.drop(self._key(slot))

    def launch(self, now: float, deadline: float) -> int:
        """A compute ticket."""
        return self.ledger.fences.launch("compute", deadline)

    def signal(self, ticket: int) -> None:
        """The launch is over."""
        self.ledger.signal(ticket)

    def expire(self, now: float) -> None:
        """Give up launches past their deadline."""
        self.ledger.expire(now)

    def settle(self, slots: list[int], accounts: list[int]) -> None:
        """After a step: charge the pages the tables took, discharge those they dropped."""
        for slot, account in zip(slots, accounts, strict=True):
            self.ledger.claim(self.engine.tables.held(self.rows[slot].id), account)
        for row in self.shadows:
            self.ledger.claim(self.engine.tables.held(row.id), _NOBODY)
        self.ledger.reconcile()

    def spare_pages(self) -> int:
        """Free pages that nobody was promised."""
        return self.engine.tables.pool.free - self._owed()

    def pages_to_gather(self, slot: int) -> int:
        """Most pages that copying what the slot's row keeps can take, and a step of two rows."""
        return (self._held(self.rows[slot]) + 4) * self._heads

    def blocks_held(self, slot: int) -> int:
        """Blocks that the slot's row holds, by its longest page list."""
        return self._held(self.rows[slot])

    def fork(self, slot: int, policy: Policy | None) -> Sequence:
        """A row beside the slot's that shares its pages, outside of all promises; give it to :meth:`drop`."""
        row = self.engine.fork(self.rows[slot], policy)
        self.shadows.append(row)
        return row

    def fork_shadow(self, shadow: Sequence) -> Sequence:
        """A row beside a shadow."""
        row = self.engine.fork(shadow)
        self.shadows.append(row)
        return row

    def drop(self, shadow: Sequence, tickets: Iterable[int] = ()) -> None:
        """Release a shadow."""
        self.shadows = [row for row in self.shadows if row is not shadow]
        self._release_row(shadow, tuple(tickets))

    def remember(self, slot: int, prompt: Tokens) -> None:
        """The prompt is computed: its whole blocks enter the prefix cache."""
        if self.cache is not None:
            prefix.remember(self.engine, self.cache, self._holds[slot], self.rows[slot], prompt)

    def audit(self) -> Finding:
        """Compare the pool with what rows and holds claim."""
        rows = [*self.rows.values(), *self.shadows]
        held = [self.engine.tables.held(r.id) for r in rows] + [h.pages() for h in self._holds.values()]
        return inspect(self.ledger, claims(self.engine.tables.pool.total, held))

    def repair(self) -> PageIds:
        """Quarantine orphans until all launches so far are over; returns pages given back."""
        return repair(self.ledger, self.audit(), self.ledger.fences.tickets())

    def check(self) -> None:
        """Raise AssertionError unless pages, promises, cache and tables agree."""
        self.ledger.check()
        if self.cache is not None:
            self.cache.check()
        finding = self.audit()
        assert finding.clean, f"orphans {finding.orphans.tolist()}, miscounted {finding.miscounted.tolist()}"
        assert self.available() >= 0, "more blocks promised than there are"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _held(self, row: Sequence) -> int:
        return int(self.engine.tables.counts[row.id].max())

    def _owed(self) -> int:
        """Pages promised and not taken yet."""
        return self._heads * sum(max(0, n - self._held(self.rows[s])) for s, n in self._promised.items())

    def _make_room(self, blocks: int) -> None:
        free = (self.engine.tables.pool.free - self._owed()) // self._heads
        if blocks > free and self.cache is not None and blocks - free <= self.cache.evictable:
            self.cache.evict(blocks - free)
            free = (self.engine.tables.pool.free - self._owed()) // self._heads
        if blocks > free:
            raise OutOfPages(blocks, free)

    def _exclusive(self, slot: int) -> int:
        held = self.engine.tables.held(self.rows[slot].id)
        hold = self._holds.get(slot)
        shared = hold.pages() if hold is not None else NO_PAGES
        own = 1 + np.isin(held, shared)
        alone = (self.ledger.pool.ref[held] == own) & (self.ledger.fences.busy[held] == 0)
        unused = max(0, self._promised[slot] - self._held(self.rows[slot]))
        return int(alone.sum()) // self._heads + unused

    def _release_row(self, row: Sequence, tickets: tuple[int, ...]) -> None:
        ids = self.engine.tables.held(row.id)
        self.ledger.claim(ids, 0)
        gone = self.engine.tables.release(row.id, State.FENCED)
        row.released = True
        kept = self.ledger.released(ids, gone, tickets)
        if self.cache is not None:
            self.cache.returned(kept)

    def _key(self, slot: int) -> str:
        return self._served(slot).spec.id
