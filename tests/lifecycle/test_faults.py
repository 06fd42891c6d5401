"""Faults of the manager where its parts meet: quotas while rows grow, launches that never signal, calls out of turn."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from kvgate.lifecycle.admission import Outcome, Reason
from kvgate.lifecycle.config import EstimatorConfig, ManagerConfig, TenantConfig
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.manager import Manager, OutOfTurnError
from kvgate.lifecycle.observer import NullObserver
from kvgate.lifecycle.pool import PagePool, State
from kvgate.lifecycle.prefix.cache import PrefixCache
from kvgate.lifecycle.prefix.keys import Namespace
from kvgate.lifecycle.prefix.policies import Recency
from kvgate.lifecycle.states import Spec
from kvgate.lifecycle.states import State as Stage
from kvgate.lifecycle.store import FlatStore

HASTY = EstimatorConfig(prior_mean=0.02, prior_weight=1000.0)


class World:
    """A manager with a clock that moves by one a round."""

    def __init__(self, config: ManagerConfig, blocks: int, observer: NullObserver | None = None) -> None:
        self.now = 0.0
        self.store = FlatStore(blocks)
        self.manager = Manager(config, self.store, lambda: self.now, (), observer)

    def drain(self, most: int = 3000) -> int:
        """Rounds until nobody is left."""
        for round_ in range(most):
            if not len(self.manager.requests):
                return round_
            self.now += 1.0
            self.manager.commit(self.manager.plan())
            self.store.check()
            self.look()
        raise AssertionError(f"{len(self.manager.requests)} requests are left")

    def look(self) -> None:
        """Replaced by what a test watches."""


@pytest.mark.parametrize("believes", [HASTY, EstimatorConfig(prior_mean=0.9, prior_weight=1000.0)])
def test_a_page_quota_holds_while_rows_grow(believes: EstimatorConfig) -> None:
    tenants = {"t": TenantConfig(page_quota=10), "default": TenantConfig()}
    world = World(replace(ManagerConfig(), tenants=tenants, estimator=believes), 200)
    for i in range(4):
        world.manager.submit(Spec(f"t{i}", 20, 130, "t"))
        world.manager.submit(Spec(f"o{i}", 20, 130))
    held: list[int] = []
    others: list[int] = []

    def look() -> None:
        blocks = dict(zip(world.manager.tenants.names, world.manager.tenants.blocks.tolist(), strict=True))
        held.append(blocks["t"])
        others.append(blocks["default"])

    world.look = look  # type: ignore[method-assign]
    world.drain()
    assert max(held) == 10
    assert max(others) > 30, "nobody else is held to it"


def test_a_launch_that_never_signals_stalls_nobody_and_is_told() -> None:
    alarms: list[int] = []

    class Alarm(NullObserver):
        def launch_overdue(self, pages: int) -> None:
            alarms.append(pages)

    def world(blocks: int) -> World:
        return World(replace(ManagerConfig(), estimator=HASTY, fence_timeout=30.0), blocks, Alarm())

    hung = world(40)
    hung.manager.submit(Spec("dead", 48, 1))
    plan = hung.manager.plan()
    hung.manager.export("dead", hung.store.launch(0.0, 1e18))
    hung.manager.commit(plan)
    clear = world(37)
    for one in (hung, clear):
        for i in range(6):
            one.manager.submit(Spec(f"r{i}", 40, 300))
    assert hung.drain() <= clear.drain() + 31
    assert alarms == [3]
    assert hung.store.ledger.pool.counts()[State.QUARANTINED] == 3
    hung.store.signal(1 + max(hung.store.ledger.fences.tickets()))  # some other ticket: nothing happens
    assert hung.store.ledger.pool.counts()[State.QUARANTINED] == 3
    for ticket in hung.store.ledger.fences.tickets():
        hung.store.signal(ticket)
    assert hung.store.available() == 40


def test_calls_out_of_turn_are_refused_by_name() -> None:
    world = World(ManagerConfig(), 8)
    world.manager.submit(Spec("a", 60, 60))
    first = world.manager.plan()
    with pytest.raises(OutOfTurnError, match="round 1 is not over"):
        world.manager.plan()
    world.manager.end("a", Stage.CANCELLED)
    assert world.store.available() == 4, "the launch may still touch its pages"
    world.manager.commit(first)
    assert world.store.available() == 8
    with pytest.raises(OutOfTurnError, match="round 1 is not the one"):
        world.manager.commit(first)


def test_rejected_requests_leave_no_account_and_names_are_not_kept_for_ever() -> None:
    world = World(ManagerConfig(), 10)
    for i in range(2000):
        refused = world.manager.submit(Spec(f"x{i}", 10_000, 10, f"tenant{i}"))
        assert refused.reason is Reason.IMPOSSIBLE
    assert world.manager.tenants.names == []
    for i in range(600):
        assert world.manager.submit(Spec(f"y{i}", 10, 2, f"tenant{i}")).outcome is Outcome.QUEUE
        world.drain()
    assert len(world.manager.tenants.names) < 300
    assert len(world.manager.estimator.survival) <= 512
    # Two waiting tenants never share an account.
    for i in range(400):
        world.manager.submit(Spec(f"z{i}", 10, 2, f"late{i}"))
    assert len(set(world.manager.tenants.names)) == len(world.manager.tenants.names)
    world.drain()


@pytest.mark.slow
def test_more_tenants_than_sixteen_bits_count() -> None:
    world = World(replace(ManagerConfig(), max_running=1), 10)
    for i in range(32_767):
        world.manager.tenants.account(f"tenant{i}")
    for i in range(3):
        assert world.manager.submit(Spec(f"y{i}", 10, 2, f"late{i}")).outcome is Outcome.QUEUE
    assert int(world.manager.requests.account[world.manager.requests.index["y2"]]) == 32_769


def _round_ms(waiting: int, tenant: TenantConfig) -> float:
    tenants = {"t": tenant, "default": TenantConfig()}
    world = World(replace(ManagerConfig(), tenants=tenants), 4000)
    for i in range(waiting):
        world.manager.submit(Spec(f"r{i}", 40, 2000, "t", deadline=1e9))
    took = []
    for _ in range(40):
        begun = time.process_time()
        world.manager.commit(world.manager.plan())
        took.append(time.process_time() - begun)
    return 1000.0 * float(np.median(took))


@pytest.mark.parametrize("tenant", [TenantConfig(max_concurrency=4), TenantConfig(page_quota=200)])
def test_a_round_does_not_cost_more_with_a_longer_queue(tenant: TenantConfig) -> None:
    few, many = _round_ms(100, tenant), _round_ms(10_000, tenant)
    assert many < 3.0 or many < 4.0 * few, f"{few:.2f} ms with 100 waiting, {many:.2f} ms with 10,000"


def test_a_busy_child_of_an_idle_prefix_block_does_not_count_as_free() -> None:
    ledger = Ledger(PagePool(6))
    cache = PrefixCache(ledger, Recency(), 2, lambda: 0.0)
    space = Namespace("v1", "a")
    hold = cache.lookup(space, np.arange(8))
    own = ledger.alloc(4)
    cache.insert(hold, np.arange(8), own)
    ledger.release(own)
    copy = ledger.fences.launch("copy", 1e9)
    ledger.fences.hold(own[2:], [copy])
    cache.release(hold)
    assert (cache.evictable, cache.at_once, cache.soon) == (4, 2, 2)
    assert cache.evict(2) == 2, "the busy leaves go so that the idle blocks above them can"
    cache.check()
    ledger.check()
    assert ledger.pool.free == 4
    ledger.signal(copy)
    assert ledger.pool.free == 6
