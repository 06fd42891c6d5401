"""The prefix cache: exact blocks of earlier prompts, found by chained key and checked by their tokens.

Blocks form a tree (a block's parent is the prefix before it). Whoever uses blocks has a :class:`Hold`, which keeps one
reference to every page from the root down; so a page without references has no descendant in use, and what can be
evicted is exactly what is CACHED. Eviction takes leaves only, by the policy's score, from a heap with lazy deletion:
O(log n) each. The ledger decides when a page is really free (last reference, last fence).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.ledger import NO_PAGES, Ledger
from kvgate.lifecycle.pool import PageIds, State
from kvgate.lifecycle.prefix.keys import Hasher, Namespace, blake
from kvgate.lifecycle.prefix.policies import RetentionPolicy, Score, Touch

Tokens = NDArray[np.int64]
_CACHED = int(State.CACHED)  # a plain integer: enum look-ups cost more than the comparison


class _Node:
    __slots__ = ("alive", "children", "depth", "fill", "key", "pages", "parent", "score", "space", "stamp", "tokens")

    def __init__(self, key: bytes, parent: _Node | None, tokens: bytes, pages: PageIds, space: Namespace) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.space = space
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.fill = 1.0
        self.children = 0
        self.score: Score = (0.0, 0.0)
        self.stamp = 0
        self.alive = True


@dataclass
class Hold:
    """Blocks somebody uses, from the root down; given back with :meth:`PrefixCache.release` exactly once.

    Attributes:
        space: whose they are. tokens: tokens they cover. born: look-up that made it, 0 for none.
    """

    space: Namespace
    tokens: int = 0
    born: int = 0
    nodes: list[_Node] = field(default_factory=list)
    open: bool = True

    @property
    def blocks(self) -> int:
        """Blocks held."""
        return len(self.nodes)

    def pages(self) -> PageIds:
        """Page ids int32 ``[blocks * pages per block]``, block by block."""
        return np.concatenate([NO_PAGES, *(n.pages for n in self.nodes)])


@dataclass(frozen=True)
class Invalidation:
    """What a forced invalidation did: entries ``dropped``, pages ``freed`` at once, pages still ``in_use``."""

    dropped: int
    freed: int
    in_use: int


@dataclass
class Counts:
    """Since the start, in blocks. ``found_again``: by the request that had put them there, after a preemption."""

    looked_up: int = 0
    hit: int = 0
    found_again: int = 0
    inserted: int = 0
    evicted: int = 0
    expired: int = 0
    invalidated: int = 0
    refused: int = 0


class PrefixCache:
    """See the module docstring.

    Args:
        ledger: pages of this pool. policy: decides what goes first. page_size: tokens of a block.
        clock: for policies that look at time. hasher: 32-byte hash; replaced only by tests of collisions.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: RetentionPolicy,
        page_size: int,
        clock: Callable[[], float],
        hasher: Hasher = blake,
    ) -> None:
        self.ledger = ledger
        self.policy = policy
        self.page_size = page_size
        self.clock = clock
        self.counts = Counts()
        self._hash = hasher
        self._index: dict[bytes, _Node] = {}
        self._owner: dict[int, _Node] = {}
        self._heap: list[tuple[Score, int, _Node]] = []
        self._stamp = 0
        self._tick = 0
        self._number: NDArray[np.int64] = np.zeros(ledger.pool.total, np.int64)  # of the block a kept page belongs to
        self._entered = 0
        self._invalidated: dict[tuple[str | None, str | None], int] = {}
        self.evictable = 0

    def __len__(self) -> int:
        return len(self._index)

    def lookup(self, space: Namespace, tokens: Tokens, *, again: bool = False) -> Hold:
        """The longest cached prefix of ``tokens`` (whole blocks), pinned from here on.

        ``again``: for a request that was preempted: its own work is no hit and no look-up in the counts.

        The caller leaves out what it must compute itself: at least the last token of a prompt.
        """
        self._tick += 1
        hold = Hold(space, born=self._tick)
        parent: _Node | None = None
        link = self._hash(space.encoded())
        now = self.clock()
        self.sweep(now)
        for raw, whole in self._blocks(tokens):
            self.counts.looked_up += not again
            if not whole:
                break
            link = self._hash(link + raw)
            node = self._index.get(link)
            # A colliding key is not a hit: the tokens, the parent and the owner must be the same.
            if node is None or node.tokens != raw or node.parent is not parent or node.space != space:
                break
            if self.policy.expired(node.score, now):
                break  # in use by somebody else, or the sweep would have taken it
            hold.nodes.append(node)
            parent = node
        self._pin(hold.nodes)
        hold.tokens = len(hold.nodes) * self.page_size
        self.counts.hit += 0 if again else len(hold.nodes)
        self.counts.found_again += len(hold.nodes) if again else 0
        self._touch(hold.nodes, now, hit=True)
        return hold

    def insert(self, hold: Hold, tokens: Tokens, pages: PageIds, *, exact: bool = True, fill: float = 1.0) -> int:
        """Add the whole blocks of ``tokens`` beyond what ``hold`` has; the hold then covers them too.

        Args:
            pages: int32 ``[blocks * pages per block]``, the sequence's own pages of all whole blocks, in order.
            exact: False for a sequence that was ever evicted approximately: nothing enters.
            fill: share of the last block that is filled (replays of traces with partial blocks).

        Nothing enters of a sequence whose owner was invalidated after its look-up: it was computed before.

        Returns:
            Blocks that entered; blocks another sequence put there in the meantime are held, not entered twice.
        """
        assert hold.open, "the hold was released"
        if not exact or self._outdated(hold):
            self.counts.refused += 1
            return 0
        blocks = [raw for raw, whole in self._blocks(tokens) if whole]
        per_block = len(pages) // max(1, len(blocks))
        parent = hold.nodes[-1] if hold.nodes else None
        link = parent.key if parent is not None else self._hash(hold.space.encoded())
        added: list[_Node] = []
        met: list[_Node] = []
        for at in range(len(hold.nodes), len(blocks)):
            link = self._hash(link + blocks[at])
            node = self._index.get(link)
            if node is None:
                node = _Node(link, parent, blocks[at], pages[at * per_block : (at + 1) * per_block].copy(), hold.space)
                node.fill = fill if at == len(blocks) - 1 else 1.0
                self._index[link] = node
                added.append(node)
            elif node.tokens != blocks[at] or node.parent is not parent or node.space != hold.space:
                break  # a collision: what is there stays, the rest of this prompt is not cached
            else:
                met.append(node)
            hold.nodes.append(node)
            parent = node
        self._pin(met)
        self._enter(added)
        hold.tokens = len(hold.nodes) * self.page_size
        self.counts.inserted += len(added)
        now = self.clock()
        self._touch(met, now, hit=True)
        self._touch(added, now, hit=False)
        return len(added)

    def release(self, hold: Hold, tickets: tuple[int, ...] = ()) -> None:
        """Give the hold's references back, once. Launches ``tickets`` may still read the pages."""
        if not hold.open:
            raise AssertionError("the hold was released twice")
        hold.open = False
        self.returned(self.ledger.release(hold.pages(), tickets))
        hold.nodes = []

    def returned(self, pages: PageIds) -> None:
        """Pages that lost their last reference: their blocks may be evicted from now on."""
        for page in pages[self.ledger.pool.state[pages] == State.CACHED].tolist():
            node = self._owner.get(page)  # each block is found by its first page
            if node is not None:
                self.evictable += 1
                self._offer(node)

    @property
    def at_once(self) -> int:
        """Blocks that evicting everything would free at once: no launch may touch them any more."""
        return self.evictable - self._blocks_of(self.ledger.waiting_cached())

    @property
    def soon(self) -> int:
        """Blocks that could be evicted once their launches signal; those that take too long are not counted on."""
        waiting = self.ledger.waiting_cached()
        return self._blocks_of(waiting) - self._blocks_of(waiting[self.ledger.given_up[waiting]])

    def evict(self, blocks: int) -> int:
        """Evict unused blocks, leaves first, until ``blocks`` of them are free; returns how many became free.

        Blocks that a launch may still touch free nothing yet: they go only where a block above them is needed.
        """
        gone: list[PageIds] = []
        spared: list[tuple[Score, int, _Node]] = []
        freed = 0
        while freed < blocks and (self._heap or spared):
            busy = not self._heap
            score, stamp, node = spared.pop(0) if busy else heapq.heappop(self._heap)
            if not node.alive or node.stamp != stamp or node.children or not self._idle(node):
                continue
            if not busy and self.ledger.fences.busy[node.pages].any():
                spared.append((score, stamp, node))
                continue
            gone.append(self._drop(node))
            freed += not busy
            self.policy.evicted(node.key, score)
        for entry in spared:
            heapq.heappush(self._heap, entry)
        self._forget(gone)
        self.counts.evicted += len(gone)
        return freed

    def invalidate(self, *, tenant: str | None = None, model_version: str | None = None) -> Invalidation:
        """Forget everything of a tenant, a model version, or both at once; used entries too.

        No new hit from now on; pages in use are freed with their last reference and fence.
        """
        if tenant is None and model_version is None:
            raise ValueError("invalidate: name a tenant or a model version")
        doomed = [
            n
            for n in self._index.values()
            if tenant in (None, n.space.tenant) and model_version in (None, n.space.model_version)
        ]
        self._invalidated[tenant, model_version] = self._tick
        in_use = sum(len(n.pages) for n in doomed if not self._idle(n))
        # Children before parents, so that no entry ever hangs below a missing one.
        freed = self._forget([self._drop(n) for n in sorted(doomed, key=lambda n: -n.depth)])
        self.counts.invalidated += len(doomed)
        return Invalidation(len(doomed), freed, in_use)

    def check(self) -> None:
        """Raise AssertionError unless index, tree, heap and page states agree."""
        idle = 0
        children: dict[int, int] = {}
        for node in self._index.values():
            assert node.alive, "a dropped entry is still indexed"
            assert node.parent is None or node.parent.alive, "an entry hangs below a dropped one"
            states = self.ledger.pool.state[node.pages]
            assert self.ledger.kept[node.pages].all(), "an indexed page is not kept"
            assert (states == states[0]).all(), "pages of one block are in different states"
            assert states[0] in (State.CACHED, State.REFERENCED), "an indexed page was freed"
            idle += states[0] == State.CACHED
            if node.parent is not None:
                children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        assert idle == self.evictable, f"evictable counter {self.evictable}, blocks to evict {idle}"
        assert all(children.get(id(n), 0) == n.children for n in self._index.values()), "children miscounted"
        assert int(self.ledger.kept.sum()) == sum(len(n.pages) for n in self._index.values()), "kept pages unindexed"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: Tokens) -> list[tuple[bytes, bool]]:
        size = self.page_size
        raw = np.ascontiguousarray(tokens, np.int64).tobytes()
        return [(raw[i : i + 8 * size], i + 8 * size <= len(raw)) for i in range(0, len(raw), 8 * size)]

    def sweep(self, now: float) -> None:
        """Drop unused entries whose time is over; expiry orders the heap, so they are on top."""
        while self._heap and self.policy.expired(self._heap[0][0], now):
            _, stamp, node = heapq.heappop(self._heap)
            if node.alive and node.stamp == stamp and not node.children and self._idle(node):
                self._forget([self._drop(node)])
                self.counts.expired += 1

    def _outdated(self, hold: Hold) -> bool:
        space = hold.space
        names = ((space.tenant, None), (None, space.model_version), (space.tenant, space.model_version))
        return any(hold.born <= self._invalidated.get(name, -1) for name in names)

    def _blocks_of(self, pages: PageIds) -> int:
        return len(np.unique(self._number[pages])) if len(pages) else 0

    def _idle(self, node: _Node) -> bool:
        return bool(self.ledger.pool.state[node.pages[0]] == _CACHED)

    def _pin(self, nodes: list[_Node]) -> None:
        if nodes:
            self.evictable -= sum(map(self._idle, nodes))
            self.ledger.take_cached(np.concatenate([n.pages for n in nodes]))

    def _enter(self, nodes: list[_Node]) -> None:
        if not nodes:
            return
        pages = np.concatenate([n.pages for n in nodes])
        self.ledger.share(pages)
        self.ledger.kept[pages] = True
        for node in nodes:
            self._owner[int(node.pages[0])] = node
            self._entered += 1
            self._number[node.pages] = self._entered
            if node.parent is not None:
                node.parent.children += 1

    def _touch(self, nodes: list[_Node], now: float, *, hit: bool) -> None:
        for node in nodes:
            node.score = self.policy.touch(Touch(node.key, node.depth, node.fill, self._tick, now, hit))

    def _offer(self, node: _Node) -> None:
        if node.children == 0:
            self._stamp += 1
            node.stamp = self._stamp
            heapq.heappush(self._heap, (node.score, self._stamp, node))
            if len(self._heap) > 64 + 4 * len(self._index):
                self._heap = [e for e in self._heap if e[2].alive and e[2].stamp == e[1]]
                heapq.heapify(self._heap)

    def _drop(self, node: _Node) -> PageIds:
        """Take an entry out of index and tree; its pages, which the caller must have forgotten."""
        self.evictable -= self._idle(node)
        node.alive = False
        del self._index[node.key]
        del self._owner[int(node.pages[0])]
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if parent.alive and parent.children == 0 and self._idle(parent):
                self._offer(parent)
        return node.pages

    def _forget(self, pages: list[PageIds]) -> int:
        """The ledger may free these pages as soon as nobody uses them; returns how many went at once."""
        return self.ledger.drop_cached(np.concatenate(pages)) if pages else 0
