"""Replays a trace of block hashes through the prefix cache: the hit rate with zero service time.

Each 512-token block of the trace is one block of the cache; a request looks its prefix up, enters the rest, gives
everything back, and the cache is trimmed to its size. Belady's bound knows the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgate.lifecycle.lab.workloads import MOONCAKE_BLOCK, Arrival
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.pool import PagePool
from kvgate.lifecycle.prefix.cache import PrefixCache
from kvgate.lifecycle.prefix.catalog import make_policy
from kvgate.lifecycle.prefix.keys import Namespace
from kvgate.lifecycle.prefix.policies import RetentionPolicy, Score, Touch

BELADY = "belady"


@dataclass(frozen=True)
class Replayed:
    """Blocks asked for and found; ``rate`` is their ratio."""

    policy: str
    capacity: int
    blocks: int
    hits: int
    evicted: int

    @property
    def rate(self) -> float:
        """Share of blocks found, in [0, 1]."""
        return self.hits / self.blocks if self.blocks else 0.0


class Belady:
    """Evicts what is needed again last; for bounds only, since it is told the future.

    Args:
        following: for each request (by tick) the next request that uses each of its blocks, by depth.
    """

    def __init__(self, following: Sequence[Sequence[float]]) -> None:
        self._following = following

    def touch(self, use: Touch) -> Score:
        """Sooner needed scores higher."""
        return -self._following[use.tick - 1][use.depth], -float(use.depth)

    def evicted(self, key: bytes, score: Score) -> None:
        """Nothing to remember."""

    def expired(self, score: Score, now: float) -> bool:
        """Never."""
        return False


def next_uses(arrivals: Sequence[Arrival]) -> list[list[float]]:
    """For each request and block the index of the next request with that block, inf if there is none."""
    coming: dict[int, float] = {}
    result: list[list[float]] = []
    for index in range(len(arrivals) - 1, -1, -1):
        blocks = arrivals[index].blocks
        result.append([coming.get(b, float("inf")) for b in blocks])
        coming.update((b, float(index)) for b in blocks)
    return result[::-1]


def replay(arrivals: Sequence[Arrival], policy: str, capacity: int) -> Replayed:
    """Hit rate of one policy with a cache of ``capacity`` blocks. Raises ValueError without block hashes."""
    if capacity < 1:
        raise ValueError(f"cache of {capacity} blocks: needs at least 1")
    if not any(a.blocks for a in arrivals):
        raise ValueError("this workload names no block hashes; prefix policies need a trace that does")
    order: RetentionPolicy = Belady(next_uses(arrivals)) if policy == BELADY else make_policy(policy)
    ledger = Ledger(PagePool(capacity + max(len(a.blocks) for a in arrivals)))
    now = 0.0
    cache = PrefixCache(ledger, order, 1, lambda: now)
    space = Namespace("trace", "trace")
    asked = 0
    for arrival in arrivals:
        now = arrival.at / 1000.0
        tokens = np.array(arrival.blocks, np.int64)
        asked += len(tokens)
        hold = cache.lookup(space, tokens)
        own = ledger.alloc(len(tokens) - hold.blocks)
        partial = arrival.spec.prompt_len % MOONCAKE_BLOCK
        fill = partial / MOONCAKE_BLOCK if partial else 1.0
        cache.insert(hold, tokens, np.concatenate([hold.pages(), own]), fill=fill)
        ledger.release(own)
        cache.release(hold)
        cache.evict(len(cache) - capacity)
    return Replayed(policy, capacity, asked, cache.counts.hit, cache.counts.evicted)
