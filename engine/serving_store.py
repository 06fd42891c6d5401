"""The manager's store over the engine's page tables, with prefix cache and host swap area.

The manager counts whole blocks (``page_size`` tokens over all layers and kv heads); the tables take pages only when
tokens are appended. What was promised and not yet taken is subtracted from what is available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvgate.engine import prefix, swap
from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence
from kvgate.engine.served import Served
from kvgate.lifecycle.audit import Finding, claims, inspect, repair
from kvgate.lifecycle.ledger import NO_PAGES, Ledger
from kvgate.lifecycle.pool import OutOfPages, State
from kvgate.lifecycle.prefix.cache import Hold, PrefixCache, Tokens
from kvgate.lifecycle.prefix.keys import Namespace
from kvgate.lifecycle.prefix.policies import RetentionPolicy
from kvgate.lifecycle.store import Slots
from kvgate.lifecycle.swap.area import HostArea


def _no_cache_because(windows: tuple[int | None, ...], retention: RetentionPolicy | None) -> str | None:
    if retention is None:
        return "no retention policy was chosen"
    if windows:
        return "layers with native windows drop the pages behind them: a later prompt could not attend a cached prefix"
    return None


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
        declared = engine.info.native_windows
        self.windows: tuple[int | None, ...] = tuple(w or None for w in declared) if any(declared) else ()
        self.no_cache_because = _no_cache_because(self.windows, retention)
        self.cache: PrefixCache | None = None
        if retention is not None and self.no_cache_because is None:
            self.cache = PrefixCache(self.ledger, retention, size, clock)
        self.area = area
        self.rows: dict[int, Sequence] = {}
        self._served = served
        self._holds: dict[int, Hold] = {}
        self._promised: dict[int, int] = {}
        self._charged: dict[int, int] = {}
        self._forked = False
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
        cached = self.cache.at_once if self.cache is not None else 0
        return (self.engine.tables.pool.free - self._owed()) // self._heads + cached

    def soon(self) -> int:
        """Fenced blocks, and cached ones that a launch may still touch."""
        return self.ledger.fenced // self._heads + (self.cache.soon if self.cache is not None else 0)

    def host_free(self) -> int:
        """Blocks the host area could take, counting a little for tables beside the payload."""
        if self.area is None:
            return 0
        return self.area.free // (self._heads * (self.engine.store.page_bytes + 64) + 64)

    def begin(self, slot: int, known: int, *, shared: bool = True) -> tuple[int, int]:
        """Look the known tokens up, all but the last, which has to be computed.

        A row that a policy is going to evict takes nothing from the cache: it would pin blocks beside those that its
        policy leaves it, and hold twice what was promised.
        """
        served = self._served(slot)
        hold = Hold(Namespace(served.spec.model_version, served.spec.tenant, served.adapter))
        if self.cache is not None and shared and served.policy is None and not served.from_scratch:
            hold = self.cache.lookup(hold.space, served.known()[: known - 1], again=served.starts > 0)
        self._holds[slot] = hold
        self.rows[slot] = prefix.start(self.engine, self.ledger, hold, served.needs)
        self._promised[slot] = hold.blocks
        served.looked_up(hold.tokens)
        return hold.blocks, hold.tokens

    def grow(self, slots: Slots, blocks: NDArray[np.int64], accounts: NDArray[np.int32]) -> None:
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
        self._charged.pop(slot, None)
        if row is not None:
            self._release_row(row, tuple(tickets))
        hold = self._holds.pop(slot, None)
        if hold is not None and self.cache is not None:
            self.cache.release(hold, tuple(tickets))
        return given

    def shrink(self, slot: int, blocks: int, tickets: Iterable[int]) -> int:
        """Take promises back. Pages themselves are dropped by the row's policy or windows; what they hold stays."""
        given = max(0, self._promised[slot] - max(blocks, -(-self._pages(self.rows[slot]) // self._heads)))
        self._promised[slot] -= given
        return given

    def swap_out(self, slot: int, tickets: Iterable[int]) -> bool:
        """Copy everything the row holds to the host area, then release it; never the other way round."""
        row = self.rows[slot]
        if self.area is None:
            return False
        payload = swap.pack(self.engine, row.id, row.length)
        key = self._key(slot)
        if not self.area.reserve(key, len(payload)) or not self.area.put(key, payload):
            return False
        self._host_blocks[slot] = -(-self._pages(row) // self._heads)
        self.release(slot, tickets)
        self._parked[slot] = row
        return True

    def swap_in(self, slot: int, account: int) -> int:
        """Bring the row back into fresh pages; 0 where its payload cannot be read or trusted any more."""
        assert self.area is not None, "nothing was ever swapped out"
        payload = self.area.get(self._key(slot))
        if payload is not None:
            self._make_room(-(-swap.pages_in(payload) // self._heads))
        row = self._parked.pop(slot)
        blocks = self._host_blocks.pop(slot)
        if payload is None:
            return 0
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
        return self.ledger.fences.launch("compute", deadline, now)

    def signal(self, ticket: int) -> None:
        """The launch is over."""
        self.ledger.signal(ticket)

    def expire(self, now: float, patience: float = np.inf) -> int:
        """Give up launches past their deadline, sweep the prefix cache, set aside what waits for late launches."""
        self.ledger.expire(now)
        if self.cache is not None:
            self.cache.sweep(now)
        return self.ledger.set_aside_late(now, patience)

    def charged(self, account: int) -> int:
        """Pages charged to an account."""
        return int(self.ledger.charged[account]) if account < len(self.ledger.charged) else 0

    def settle(self, slots: list[int], accounts: list[int]) -> None:
        """After a step: charge the pages the tables took, discharge those they dropped.

        An exact row only ever appends: nothing changed if it holds as many pages as when it was charged last.
        """
        forked, self._forked = self._forked or bool(self.shadows), bool(self.shadows)
        dropping = forked or bool(self.windows)
        for slot, account in zip(slots, accounts, strict=True):
            row = self.rows[slot]
            held = self._pages(row)
            appends_only = row.policy is None and not self.windows and not forked
            if not appends_only or self._charged.get(slot) != held:
                self.ledger.claim(self.engine.tables.held(row.id), account)
                self._charged[slot] = held
            dropping |= row.policy is not None
        for row in self.shadows:
            self.ledger.claim(self.engine.tables.held(row.id), 0)  # no tenant asked for them
        if dropping:
            self.ledger.reconcile()

    def spare_pages(self) -> int:
        """Free pages that nobody was promised."""
        return self.engine.tables.pool.free - self._owed()

    def blocks_held(self, slot: int) -> int:
        """Blocks that the slot's row holds, by its longest page list."""
        return self._held(self.rows[slot])

    def drop(self, shadow: Sequence, tickets: Iterable[int] = ()) -> None:
        """Release a shadow."""
        self.shadows = [row for row in self.shadows if row is not shadow]
        self._release_row(shadow, tuple(tickets))

    def remember(self, slot: int, prompt: Tokens) -> None:
        """The prompt is computed: its whole blocks enter the prefix cache, unless a policy is to evict of them."""
        if self.cache is not None and self.rows[slot].policy is None and self._served(slot).policy is None:
            prefix.remember(self.engine, self.cache, self._holds[slot], self.rows[slot], prompt)

    def audit(self) -> Finding:
        """Compare the pool with what rows and holds claim."""
        rows = [*self.rows.values(), *self.shadows]
        held = [self.engine.tables.held(r.id) for r in rows] + [h.pages() for h in self._holds.values()]
        return inspect(self.ledger, claims(self.engine.tables.pool.total, held))

    def repair(self) -> Finding:
        """Quarantine orphans until all launches so far are over, give earlier ones back; returns what was found."""
        finding = self.audit()
        repair(self.ledger, finding, self.ledger.fences.tickets())
        return finding

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

    def _pages(self, row: Sequence) -> int:
        return int(self.engine.tables.counts[row.id].sum())

    def _owed(self) -> int:
        """Pages promised and not taken yet."""
        if not self._promised:
            return 0
        rows = [self.rows[slot].id for slot in self._promised]
        promised = self._heads * np.fromiter(self._promised.values(), np.int64, len(rows))
        held = self.engine.tables.counts[rows].sum((1, 2), dtype=np.int64)
        return int(np.maximum(0, promised - held).sum())

    def _make_room(self, blocks: int) -> None:
        free = (self.engine.tables.pool.free - self._owed()) // self._heads
        if blocks > free and self.cache is not None and blocks - free <= self.cache.at_once:
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
        unused = max(0, self._promised[slot] * self._heads - self._pages(self.rows[slot]))
        return (int(alone.sum()) + unused) // self._heads

    def _release_row(self, row: Sequence, tickets: tuple[int, ...]) -> None:
        ids = self.engine.tables.held(row.id)
        self.ledger.claim(ids, 0)
        gone = self.engine.tables.release(row.id, State.FENCED)
        row.released = True
        kept = self.ledger.released(ids, gone, tickets)
        if row.policy is not None or self.windows:
            self.ledger.reconcile()
        if self.cache is not None:
            self.cache.returned(kept)

    def _key(self, slot: int) -> str:
        return self._served(slot).spec.id
