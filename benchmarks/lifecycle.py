"""Speed of the lifecycle manager's parts, each over a range of sizes so that growth shows.

Prints pages allocated and freed per second, time per prefix-cache eviction, and time of one scheduling decision, all in
processor time, so that neighbours on the machine do not count. What was measured is checked for consistency as well.
``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.cli.replay import DEFAULT_CONFIG
from kvgate.lifecycle.config import load_config
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.pool import PagePool
from kvgate.lifecycle.prefix.cache import PrefixCache
from kvgate.lifecycle.prefix.catalog import make_policy
from kvgate.lifecycle.prefix.keys import Namespace
from kvgate.lifecycle.states import Spec
from kvgate.lifecycle.store import FlatStore


def best(work: Callable[[], int], repeats: int = 5) -> float:
    """Seconds per unit of work, the best of several runs: the others measure the neighbours."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        units = work()
        found.append((time.process_time() - start) / units)
    return min(found)


def pool_speed(total: int, batch: int = 1000) -> float:
    """Pages allocated and freed per second, in batches, with half of the pool taken by others."""
    ledger = Ledger(PagePool(total))
    ledger.alloc(total // 2)
    ledger.check()

    def work() -> int:
        for _ in range(200):
            ledger.release(ledger.alloc(batch))
        return 200 * batch

    return 1.0 / best(work)


def eviction_seconds(blocks: int, policy: str) -> float:
    """Time per eviction from a cache of ``blocks`` blocks in chains of eight, refilled between runs."""
    ledger = Ledger(PagePool(blocks + 2048))
    cache = PrefixCache(ledger, make_policy(policy), 1, lambda: 0.0)
    space = Namespace("m", "t")
    random = np.random.default_rng(0)

    def fill(count: int) -> None:
        for _ in range(count // 8):
            tokens = random.integers(0, 1 << 40, 8)
            hold = cache.lookup(space, tokens)
            own = ledger.alloc(8)
            cache.insert(hold, tokens, own)
            ledger.release(own)
            cache.release(hold)

    fill(blocks)
    found = []
    for _ in range(20):
        start = time.process_time()
        gone = sum(cache.evict(8) for _ in range(64))
        found.append((time.process_time() - start) / gone)
        fill(gone)
    if blocks <= 10_000:
        cache.check()
    return statistics.median(found)


def decision_seconds(live: int) -> dict[str, float]:
    """Time of ``plan`` with ``live`` requests, three quarters of them running; each runs for 400 tokens on average."""
    config = load_config(DEFAULT_CONFIG)
    config = type(config)(**{**config.__dict__, "max_running": live * 3 // 4, "tokens_per_step": 8192})
    store = FlatStore(live * 40)
    manager = Manager(config, store, lambda: 0.0)
    random = np.random.default_rng(0)
    for i in range(live):
        tenant = "abcd"[i % 4]
        manager.submit(Spec(f"r{i}", int(random.integers(50, 400)), 1000, tenant, int(random.integers(0, 3))))
    took, admitted = [], 0
    for round_ in range(400):
        start = time.process_time()
        plan = manager.plan()
        took.append(time.process_time() - start)
        done = plan.slots[plan.samples][random.random(int(plan.samples.sum())) < 1 / 400]
        manager.commit(plan, done.tolist())
        for j in range(live - len(manager.requests)):
            admitted += 1
            manager.submit(Spec(f"n{round_}.{j}", int(random.integers(50, 400)), 1000, "abcd"[j % 4], j % 3))
    store.check()
    steady = np.array(took[50:]) * 1e3
    return {
        "mean_ms": float(steady.mean()),
        "median_ms": float(np.median(steady)),
        "p99_ms": float(np.quantile(steady, 0.99)),
    }


def main() -> int:
    """Measure, print, and check the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    figures: dict[str, Any] = {"pool_pages_per_s": {}, "eviction_us": {}, "decision": {}}
    pool, evictions, decisions = figures["pool_pages_per_s"], figures["eviction_us"], figures["decision"]
    for total in (10_000, 100_000, 1_000_000):
        pool[total] = pool_speed(total)
        print(f"pool of {total:>9,} pages: {pool[total]:>13,.0f} pages allocated and freed per second")
    for policy in ("lru", "value_density"):
        evictions[policy] = {}
        for blocks in (1000, 10_000, 100_000, 1_000_000):
            evictions[policy][blocks] = 1e6 * eviction_seconds(blocks, policy)
            print(f"{policy:13} of {blocks:>9,} blocks: {evictions[policy][blocks]:6.2f} us per eviction", flush=True)
    for live in (100, 300, 1000):
        row = decisions[live] = decision_seconds(live)
        print(f"{live:>5} live requests: {row['median_ms']:.2f} ms a decision, mean {row['mean_ms']:.2f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    spread = max(pool.values()) / min(pool.values())
    growth = max(max(r.values()) / min(r.values()) for r in evictions.values())
    decision = decisions[1000]["median_ms"]
    print(f"pool speed within {spread:.2f} x, eviction within {growth:.2f} x, {decision:.2f} ms at 1,000 requests")
    return 0 if spread <= 1.5 and growth <= 3.0 and decision < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
