"""The prefix cache: who may hit what, what an eviction and an invalidation really free, and how policies order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvgate.lifecycle.lab.prefix_replay import replay
from kvgate.lifecycle.lab.workloads import Arrival, load_workload
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.pool import OutOfPages, PagePool, State
from kvgate.lifecycle.prefix.cache import Hold, PrefixCache
from kvgate.lifecycle.prefix.catalog import CATALOG, make_policy
from kvgate.lifecycle.prefix.keys import Hasher, Namespace, blake
from kvgate.lifecycle.prefix.policies import Touch
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.states import Spec

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
A = Namespace("m1", "t1")


class Shelf:
    """A cache of blocks of two tokens, with a clock, checked after every operation."""

    def __init__(self, pages: int = 8, policy: str = "lru", hasher: Hasher = blake) -> None:
        self.now = 0.0
        self.ledger = Ledger(PagePool(pages))
        self.cache = PrefixCache(self.ledger, make_policy(policy), 2, lambda: self.now, hasher)

    def serve(self, space: Namespace, tokens: list[int], *, exact: bool = True, keep: bool = False) -> tuple[int, Hold]:
        """One request: its hit in blocks, and its hold (given back unless ``keep``)."""
        asked = np.array(tokens, np.int64)
        hold = self.cache.lookup(space, asked)
        hit = hold.blocks
        missing = len(tokens) // 2 - hit
        self.cache.evict(missing - self.ledger.pool.free)
        own = self.ledger.alloc(missing)
        self.cache.insert(hold, asked, np.concatenate([hold.pages(), own]), exact=exact)
        self.cache.returned(self.ledger.release(own))
        if not keep:
            self.cache.release(hold)
        self.check()
        return hit, hold

    def check(self) -> None:
        self.ledger.check()
        self.cache.check()


def test_06_pins_come_back_whatever_happens_after_a_lookup() -> None:
    shelf = Shelf()
    shelf.serve(A, [1, 2, 3, 4, 5, 6])
    for used in (0, 2, 3):
        hold = shelf.cache.lookup(A, np.array([1, 2, 3, 4, 5, 6]))
        assert shelf.cache.evictable == 0
        pages = hold.pages()[:used]
        shelf.ledger.share(pages)
        with pytest.raises(OutOfPages):
            shelf.ledger.alloc(6)
        shelf.cache.release(hold)
        shelf.check()
        shelf.cache.returned(shelf.ledger.release(pages))
        shelf.check()
        assert shelf.cache.evictable == 3
        with pytest.raises(AssertionError, match="released twice"):
            shelf.cache.release(hold)


def test_19_hit_blocks_are_not_evicted_by_the_same_admission() -> None:
    shelf = Shelf(4)
    shelf.serve(A, [1, 2, 3, 4, 5, 6, 7, 8])
    hold = shelf.cache.lookup(A, np.array([1, 2, 3, 4, 9, 9, 9, 9]))
    assert hold.blocks == 2
    held = hold.pages().tolist()
    assert shelf.cache.evict(4) == 2
    fresh = shelf.ledger.alloc(2)
    assert not set(fresh.tolist()) & set(held)
    shelf.check()


def test_21_nobody_hits_across_tenant_model_or_adapter() -> None:
    tokens = [1, 2, 3, 4]
    shelf = Shelf(32)
    spaces = [A, Namespace("m1", "t2"), Namespace("m2", "t1"), Namespace("m1", "t1", "x"), Namespace("m1", "t1x", "")]
    assert [shelf.serve(s, tokens)[0] for s in spaces] == [0] * 5
    assert [shelf.serve(s, tokens)[0] for s in spaces] == [2] * 5
    # Moving bytes between fields changes the encoding.
    assert len({s.encoded() for s in [*spaces, Namespace("m", "1t1"), Namespace("", "m1t1")]}) == 7


def test_21_a_forced_collision_is_no_hit() -> None:
    shelf = Shelf(8, hasher=lambda data: b"same" * 8)
    shelf.serve(A, [1, 2])
    assert shelf.serve(A, [3, 4])[0] == 0
    assert shelf.serve(Namespace("m1", "t2"), [1, 2])[0] == 0
    assert shelf.serve(A, [1, 2])[0] == 1


@pytest.mark.parametrize("policy", CATALOG)
def test_22_sessions_in_turns_hit_while_they_fill_a_quarter_of_the_pool(policy: str) -> None:
    shelf = Shelf(128, policy=policy)
    sessions = [[100 * s + i for i in range(8)] for s in range(8)]
    hits = [shelf.serve(A, tokens)[0] for _ in range(4) for tokens in sessions]
    assert hits == [0] * 8 + [4] * 24


@pytest.mark.parametrize("policy", CATALOG)
def test_eviction_takes_leaves_and_the_counter_tells_the_truth(policy: str) -> None:
    shelf = Shelf(32, policy=policy)
    random = np.random.default_rng(1)
    for _ in range(120):
        shelf.now += 1.0
        shelf.serve(A, random.integers(0, 2, 2 * int(random.integers(1, 6))).tolist())
        could = shelf.cache.evictable
        if random.random() < 0.2:
            assert shelf.cache.evict(1000) == could
            assert shelf.ledger.pool.free == 32
            shelf.check()


def test_25_invalidation_is_immediate_and_truthful() -> None:
    shelf = Shelf(16)
    other = Namespace("m1", "t2")
    shelf.serve(other, [1, 2, 3, 4])
    shelf.serve(A, [7, 8, 9, 9])
    _, hold = shelf.serve(A, [1, 2, 3, 4, 5, 6], keep=True)
    read = shelf.ledger.fences.launch("read", 99.0)
    done = shelf.cache.invalidate(tenant="t1")
    assert (done.dropped, done.freed, done.in_use) == (5, 2, 3)
    shelf.check()
    assert shelf.cache.lookup(A, np.array([1, 2, 3, 4])).blocks == 0
    shelf.cache.release(hold, (read,))
    assert shelf.ledger.pool.counts()[State.FENCED] == 3
    shelf.ledger.signal(read)
    assert shelf.ledger.pool.free == 14
    assert shelf.serve(other, [1, 2, 3, 4])[0] == 2
    assert shelf.cache.invalidate(model_version="m1").dropped == 2
    assert shelf.ledger.pool.free == 16
    shelf.check()
    with pytest.raises(ValueError, match="name a tenant or a model version"):
        shelf.cache.invalidate()


def test_a_tainted_sequence_leaves_nothing_behind() -> None:
    shelf = Shelf()
    shelf.serve(A, [1, 2, 3, 4], exact=False)
    assert len(shelf.cache) == 0
    assert shelf.cache.counts.refused == 1
    assert shelf.ledger.pool.free == 8


def test_time_to_live_ends_what_nobody_uses() -> None:
    shelf = Shelf(policy="ttl")
    shelf.serve(A, [1, 2, 3, 4])
    shelf.now = 599.0
    assert shelf.serve(A, [1, 2])[0] == 1
    shelf.now = 1198.0
    assert shelf.serve(A, [1, 2, 3, 4])[0] == 1, "the second block was last used at 0"
    shelf.now = 2500.0
    assert shelf.serve(A, [1, 2])[0] == 0
    assert shelf.cache.counts.expired > 0
    with pytest.raises(ValueError, match="ttl of 0"):
        CATALOG["ttl"](0)  # type: ignore[call-arg]


def test_value_density_prefers_what_comes_back_and_forgets_it_in_time() -> None:
    policy = ValueDensity()

    def touch(key: bytes, tick: int, fill: float = 1.0) -> float:
        return policy.touch(Touch(key, 0, fill, tick, 0.0, False))[0]

    once = touch(b"once", 1)
    for tick in range(1, 5):
        often = touch(b"often", tick)
    assert often > once
    assert touch(b"part", 5, fill=0.5) < touch(b"whole", 5)
    policy.evicted(b"often", (often, 4.0))
    assert touch(b"new", 5000) > often, "the level has risen to what was evicted"
    assert touch(b"often", 50_000) < often + 2.0, "old uses count for nothing by now"


def test_unknown_policies_and_traces_without_hashes_are_named() -> None:
    with pytest.raises(ValueError, match="prefix policy 'mru'"):
        make_policy("mru")
    plain = [Arrival(Spec("a", 5, 5), 0.0, 5)]
    with pytest.raises(ValueError, match="no block hashes"):
        replay(plain, "lru", 10)
    with pytest.raises(ValueError, match="cache of 0 blocks"):
        replay(plain, "lru", 0)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not on this machine")
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_public_traces_meet_the_published_figures_and_beat_lru(trace: str) -> None:
    arrivals, unit = load_workload(TRACES / f"mooncake_{trace}_trace.jsonl")
    assert unit == "ms"
    published = {"conversation": (4.5, 6.5, 21.2, 32.6), "synthetic": (8.4, 19.1, 42.4, 62.4)}[trace]
    sizes = (1000, 3000, 10_000, 30_000)
    for capacity, expected in zip(sizes, published, strict=True):
        lru = replay(arrivals, "lru", capacity).rate
        value = replay(arrivals, "value_density", capacity).rate
        assert round(100 * lru, 1) == expected
        assert value >= lru * (1.1 if capacity <= 3000 else 1.0)
