"""Operation sequences that broke other systems (the numbers are those of the shared scenario list), each with the right
behaviour. Everything is checked after every operation: page states, fences, accounts, line and tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvgate.lifecycle.admission import Decision, Offer, Outcome, Reason
from kvgate.lifecycle.audit import claims, inspect, repair
from kvgate.lifecycle.config import (
    AdmissionConfig,
    EstimatorConfig,
    ManagerConfig,
    PreemptionConfig,
    TenantConfig,
)
from kvgate.lifecycle.footprint import Footprint
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.plan import Plan
from kvgate.lifecycle.pool import DuplicateIds, OutOfPages, PageError, PageIds, PagePool, State, WrongState
from kvgate.lifecycle.states import IllegalTransitionError, Spec, check_move
from kvgate.lifecycle.states import State as Stage
from kvgate.lifecycle.store import FlatStore
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk

# One token a block would hide rounding; four keep the numbers small.
PLAIN = ManagerConfig(
    page_size=4,
    tokens_per_step=1000,
    max_running=8,
    aging_rounds=50,
    fence_timeout=10.0,
    admission=AdmissionConfig(reserve=0.0, watermark_per_level=0.0, watermark_max=0.0, z_without_host=0.0),
    # Believes in short answers, so that pools run full.
    estimator=EstimatorConfig(prior_mean=0.02, prior_weight=1e6),
)


@dataclass
class World:
    """A manager over a plain store, checked after every operation."""

    blocks: int
    config: ManagerConfig = PLAIN
    host: int = 0
    offers: tuple[Offer, ...] = ()
    now: float = 0.0
    store: FlatStore = field(init=False)
    manager: Manager = field(init=False)

    def __post_init__(self) -> None:
        self.store = FlatStore(self.blocks, self.host)
        self.manager = Manager(self.config, self.store, lambda: self.now, self.offers)

    @property
    def ledger(self) -> Ledger:
        return self.store.ledger

    def submit(
        self, id: str, prompt: int, most: int = 10, tenant: str = "default", priority: int = 0,
        deadline: float | None = None, version: str = "",
    ) -> Decision:  # fmt: skip
        decision = self.manager.submit(Spec(id, prompt, most, tenant, priority, deadline, version))
        self.store.check()
        return decision

    def plan(self) -> Plan:
        plan = self.manager.plan()
        self.store.check()
        return plan

    def commit(self, plan: Plan, *finished: str) -> None:
        self.manager.commit(plan, [self.slot(id) for id in finished])
        self.now += 1.0
        self.store.check()

    def step(self, *finished: str) -> Plan:
        plan = self.plan()
        self.commit(plan, *finished)
        return plan

    def end(self, id: str, state: Stage = Stage.CANCELLED) -> bool:
        done = self.manager.end(id, state)
        self.store.check()
        return done

    def slot(self, id: str) -> int:
        return self.manager.requests.index[id]

    def stage(self, id: str) -> Stage:
        return Stage(self.manager.requests.state[self.slot(id)])

    def pages(self, id: str) -> set[int]:
        return set(self.store.held(self.slot(id)).tolist())

    def planned(self, plan: Plan) -> set[str]:
        return {self.manager.requests.spec(int(s)).id for s in plan.slots}


def counts(world: World, state: State) -> int:
    return world.ledger.pool.counts()[state]


# -- fences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["finish", "abort", "preempt", "swap"])
def test_01_pages_in_flight_are_not_given_away(way: str) -> None:
    world = World(8, host=8 if way == "swap" else 0)
    world.submit("A", 13)
    plan = world.plan()
    mine = world.pages("A")
    copy = world.store.launch(world.now, 99.0)
    world.manager.export("A", copy)
    if way in ("preempt", "swap"):
        world.manager.preempt(world.slot("A"), "test")
    else:
        world.end("A", Stage.FAILED if way == "abort" else Stage.CANCELLED)
    assert counts(world, State.FENCED) == 4
    world.commit(plan)
    assert counts(world, State.FENCED) == 4, "the round is over, the copy is not"
    world.submit("B", 20)
    second = world.step()
    assert "B" not in world.planned(second), "B needs pages that the copy may still touch"
    assert not any(set(world.store.held(int(s)).tolist()) & mine for s in second.slots)
    world.store.signal(copy)
    world.end("A")
    assert world.planned(world.plan()) == {"B"}
    assert world.pages("B") & mine


def test_01_two_streams_complete_out_of_order() -> None:
    ledger = Ledger(PagePool(4))
    pages = ledger.alloc(4)
    compute, copy = ledger.fences.launch("compute", 9.0), ledger.fences.launch("copy", 9.0)
    ledger.release(pages, [compute, copy])
    for first, second in ((copy, compute),):
        assert ledger.signal(first) == 0
        ledger.check()
        with pytest.raises(OutOfPages):
            ledger.alloc(1)
        assert ledger.signal(second) == 4
        ledger.check()


def test_01_a_shared_page_waits_for_a_launch_of_the_one_who_left_first() -> None:
    ledger = Ledger(PagePool(2))
    pages = ledger.alloc(2)
    ledger.share(pages)
    read = ledger.fences.launch("export", 9.0)
    ledger.release(pages, [read])
    ledger.release(pages)
    ledger.check()
    assert ledger.pool.free == 0
    assert ledger.signal(read) == 2


def test_02_windows_move_on_settled_tokens_only() -> None:
    # Replayed slot by slot: new tokens take dead slots first, a page goes when its last slot dies.
    for size, window, chunk in ((8, 24, 24), (8, 25, 3), (4, 7, 1), (32, 128, 128)):
        one = Footprint(size, (window,))
        pages: list[set[int]] = []
        settled, most = 0, 0
        while settled < 5 * window:
            fresh = min(chunk, 5 * window - settled)
            room = [page for page in pages for _ in range(size - len(page))]
            missing = max(0, fresh - len(room))
            pages += [set() for _ in range(-(-missing // size))]
            room = [page for page in pages for _ in range(size - len(page))]
            for token, page in zip(range(settled, settled + fresh), room, strict=False):
                page.add(token)
            assert len(pages) <= one.blocks(settled, fresh), "the row holds more than was reckoned with"
            assert set().union(*pages) >= set(range(max(0, settled - window + 1), settled + fresh))
            most = max(most, len(pages))
            settled += fresh
            # Only now may the boundary move: what was in flight is settled.
            pages = [kept for page in pages if (kept := {t for t in page if t >= settled - window + 1})]
        assert most <= one.reaching(5 * window, chunk) <= most + 1
    with pytest.raises(ValueError, match="window 0"):
        Footprint(4, (0,))


def test_03_pages_soon_free_are_waited_for_instead_of_preempting() -> None:
    world = World(4)
    world.submit("A", 3, 5)
    world.submit("B", 3, 5)
    world.step()
    lent = world.ledger.alloc(2, 0)
    copy = world.ledger.fences.launch("copy", 99.0)
    # Both need a second page within two tokens; the other two pages are on their way back.
    world.ledger.release(lent, [copy])
    plans = [world.step() for _ in range(3)]
    assert not any(p.preempted for p in plans)
    assert sum(p.stalled for p in plans) > 0
    world.ledger.signal(copy)
    plan = world.step()
    assert world.planned(plan) == {"A", "B"}
    assert not plan.preempted


@pytest.mark.parametrize("moment", ["before", "during", "done", "failed"])
def test_04_cancel_around_an_asynchronous_copy(moment: str) -> None:
    world = World(8)
    world.submit("R", 13)
    world.step()
    if moment == "before":
        world.end("R")
    ticket = world.ledger.fences.launch("copy", 99.0)
    if moment != "before":
        world.manager.export("R", ticket)
    if moment in ("done", "failed"):
        world.ledger.signal(ticket)
    world.end("R")
    assert counts(world, State.FENCED) == (4 if moment == "during" else 0)
    world.ledger.signal(ticket)
    world.ledger.signal(ticket)
    world.store.check()
    assert world.store.available() == 8


def test_05_a_signal_that_never_comes_is_given_up_at_its_deadline() -> None:
    world = World(8)
    world.submit("R", 13)
    world.step()
    ticket = world.ledger.fences.launch("copy", 5.0)
    world.manager.export("R", ticket)
    world.end("R")
    assert world.store.available() == 4
    world.now = 5.0
    world.submit("B", 29, 4)
    world.step()
    held = world.pages("B")
    assert len(held) == 8
    world.ledger.signal(ticket)
    world.store.check()
    assert world.pages("B") == held
    assert world.ledger.fences.expired == 1


# -- freeing ----------------------------------------------------------------------------------------------------------


def test_07_double_frees_raise_and_change_nothing() -> None:
    ledger = Ledger(PagePool(6))
    pages = ledger.alloc(3)

    def unchanged(bad: PageIds, error: type[Exception]) -> None:
        before = (ledger.pool.ref.copy(), ledger.pool.state.copy(), ledger.pool.free, ledger.charged.copy())
        with pytest.raises(error):
            ledger.release(bad)
        after = (ledger.pool.ref, ledger.pool.state, ledger.pool.free, ledger.charged)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        ledger.check()

    unchanged(np.array([pages[0], pages[0]], np.int32), DuplicateIds)
    unchanged(np.array([pages[0], 6], np.int32), PageError)
    unchanged(np.array([-1], np.int32), PageError)
    ledger.release(pages)
    unchanged(pages, WrongState)
    for first_parent in (True, False):
        parent = ledger.alloc(2)
        ledger.share(parent)
        assert len(ledger.release(parent)) == 0, f"parent first: {first_parent}"
        assert len(ledger.release(parent)) == 2
        unchanged(parent, WrongState)


def test_07_every_end_goes_through_one_idempotent_release() -> None:
    for state in (Stage.CANCELLED, Stage.TIMED_OUT, Stage.FAILED, Stage.FINISHED):
        world = World(8)
        world.submit("A", 13)
        world.step()
        assert world.end("A", state)
        assert not world.end("A", Stage.CANCELLED)
        assert world.store.available() == 8
    with pytest.raises(ValueError, match="DECODE is no end state"):
        World(8).end("A", Stage.DECODE)


def test_states_refuse_illegal_moves() -> None:
    for old, new in (
        (Stage.QUEUED, Stage.DECODE), (Stage.FINISHED, Stage.QUEUED), (Stage.QUEUED, Stage.FINISHED),
        (Stage.SWAPPED, Stage.DECODE), (Stage.REJECTED, Stage.ADMITTED), (Stage.DECODE, Stage.PREFILL),
    ):  # fmt: skip
        with pytest.raises(IllegalTransitionError, match="no move from"):
            check_move(old, new, "r")


# -- host area --------------------------------------------------------------------------------------------------------


def test_08_reservations_are_all_or_nothing() -> None:
    area = HostArea.open(MemoryDisk(), 10)
    waiting, done = [f"r{i}" for i in range(4)], []
    while waiting:
        taken = [k for k in waiting if area.reserve(k, 4)]
        assert 1 <= len(taken) <= 2, "somebody always gets all it needs"
        for key in taken:
            area.put(key, b"1234")
            area.drop(key)
            waiting.remove(key)
            done.append(key)
    assert len(done) == 4
    assert area.free == 10


def test_16_a_swap_is_whole_or_not_at_all() -> None:
    world = World(12, host=3)
    world.submit("A", 15)
    world.submit("B", 9)
    world.step()
    done = world.manager.preempt(world.slot("A"), "test")
    world.store.check()
    assert done.way.value == "recompute"
    assert "host area has 3 of 4 blocks" in done.why
    assert world.store.host == {}
    done = world.manager.preempt(world.slot("B"), "test")
    assert done.way.value == "swap"
    assert world.store.host == {world.slot("B"): 3}
    assert world.pages("B") == set()
    assert world.stage("B") is Stage.SWAPPED
    world.step()
    assert len(world.pages("B")) == 3
    assert world.store.host == {}


# -- admission --------------------------------------------------------------------------------------------------------


def test_09_impossible_requests_are_rejected_at_once() -> None:
    world = World(10)
    decision = world.submit("huge", 38, 10)
    assert (decision.outcome, decision.reason) == (Outcome.REJECT, Reason.IMPOSSIBLE)
    assert "12 blocks" in decision.detail
    world.submit("small", 5)
    world.step("small")
    assert not len(world.manager.requests)


def test_10_small_requests_pass_a_big_head_but_not_for_ever() -> None:
    config = replace(PLAIN, admission=replace(PLAIN.admission, max_bypass=6), max_running=30)
    world = World(20, config)
    world.submit("runs", 40, 30)
    world.step()
    world.submit("big", 60, 4)
    started, big_at = [], None
    for round_ in range(200):
        world.submit(f"s{round_}", 3, 2)
        plan = world.plan()
        started += [world.manager.requests.spec(s).id for s in plan.admitted]
        if "big" in started and big_at is None:
            big_at = started.index("big")
        world.commit(plan, *(["runs"] if round_ == 12 else []))
    assert big_at is not None
    assert 1 <= big_at <= 6 + 1


def test_12_a_victim_is_not_chosen_for_ever() -> None:
    config = replace(
        PLAIN, preemption=PreemptionConfig(max_preemptions=2), admission=replace(PLAIN.admission, resume_rounds=3)
    )
    world = World(12, config)
    for id in ("A", "B", "C"):
        world.submit(id, 3, 44)
    finished: set[str] = set()
    for _ in range(400):
        if not len(world.manager.requests):
            break
        before = set(world.manager.requests.index)
        world.step()
        finished |= before - set(world.manager.requests.index)
    assert finished == {"A", "B", "C"}


@pytest.mark.parametrize("full", ["slots", "pool", "both"])
def test_13_urgent_requests_start_at_once_and_equals_do_not_preempt(full: str) -> None:
    config = replace(PLAIN, max_running=3 if full != "pool" else 8)
    world = World(60 if full == "slots" else 30, config)
    for i in range(3):
        world.submit(f"low{i}", 37, 4, priority=5)
    world.step()
    world.submit("equal", 15, 4, priority=5)
    assert not world.step().preempted
    world.submit("urgent", 15, 8, priority=0)
    plan = world.step()
    assert "urgent" in world.planned(plan)
    assert len(plan.preempted) == 1
    assert "for more urgent urgent" in plan.preempted[0].why
    assert "score" in plan.preempted[0].why


def test_14_a_victim_planned_in_this_round_is_rolled_back_whole() -> None:
    world = World(12, replace(PLAIN, tokens_per_step=50))
    for i in range(3):
        world.submit(f"low{i}", 13, 4, priority=5)
    world.step()
    world.submit("urgent", 40, 4)
    plan = world.plan()
    assert len(plan.preempted) == 3
    assert world.planned(plan) == {"urgent"}
    assert int(plan.tokens.sum()) == 40
    assert world.store.available() == 2
    world.commit(plan)
    # An admission that cannot be met even by preempting everybody below it changes nothing.
    world.end("urgent")
    world.submit("other", 13, 4)
    assert world.planned(world.step()) == {"other", "low0", "low1"}
    world.submit("wide", 40, 4)
    plan = world.plan()
    assert world.planned(plan) == {"other", "low0", "low1"}
    assert plan.preempted == ()


def test_17_an_export_in_flight_keeps_its_pages() -> None:
    world = World(8)
    world.submit("A", 13)
    world.step()
    ticket = world.ledger.fences.launch("export", 99.0)
    world.manager.export("A", ticket)
    world.end("A", Stage.FINISHED)
    world.submit("B", 29, 4)
    assert world.planned(world.step()) == set()
    world.ledger.signal(ticket)
    assert world.planned(world.step()) == {"B"}


def test_18_orphans_are_exactly_found_quarantined_and_returned() -> None:
    world = World(16)
    world.submit("A", 13)
    world.step()
    lost = world.ledger.alloc(3, 0)
    ticket = world.ledger.fences.launch("copy", 99.0)
    found = inspect(world.ledger, claims(16, [world.store.held(world.slot("A"))]))
    assert found.orphans.tolist() == lost.tolist()
    assert len(repair(world.ledger, found, [ticket])) == 0
    assert counts(world, State.QUARANTINED) == 3
    world.store.check()
    held = world.pages("A")
    world.ledger.signal(ticket)
    clean = inspect(world.ledger, claims(16, [world.store.held(world.slot("A"))]))
    assert repair(world.ledger, clean).tolist() == sorted(lost.tolist())
    assert world.pages("A") == held
    assert world.store.available() == 12
    wrong = inspect(world.ledger, claims(16, [world.store.held(world.slot("A"))] * 2))
    assert len(wrong.miscounted) == 4
    assert repair(world.ledger, wrong).tolist() == [], "a wrong count is reported, never repaired"
    world.store.check()


def test_20_a_preempted_request_does_not_get_its_own_busy_pages_back() -> None:
    world = World(4)
    world.submit("A", 13, 4)
    world.step()
    store = world.ledger.fences.launch("store", 99.0)
    world.manager.export("A", store)
    mine = world.pages("A")
    world.manager.preempt(world.slot("A"), "test")
    assert world.planned(world.step()) == set()
    world.ledger.signal(store)
    assert world.planned(world.step()) == {"A"}
    assert world.pages("A") == mine


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_23_cancelled_in_any_state_nothing_is_scheduled_or_kept(rounds: int) -> None:
    world = World(10, host=6)
    for i in range(6):
        world.submit(f"r{i}", 11, 30, priority=i % 3)
    for _ in range(rounds):
        world.step()
    flying = world.plan()
    for i in range(6):
        world.end(f"r{i}")
    world.commit(flying)
    assert world.planned(world.step()) == set()
    assert world.store.available() == 10
    assert world.store.host_free() == 6
    assert not len(world.manager.waiting)


def test_26_full_and_windowed_layers_share_one_pool() -> None:
    # Three full layers and one with a window of 24: at 400 tokens the window saves its layer 46 of 50 pages.
    mixed = Footprint(8, (None, 24, None, None))
    assert mixed.blocks(399, 1) == -(-(3 * 50 + 4) // 4)
    assert Footprint(8, (24,) * 4).blocks(399, 1) == 4
    assert Footprint(8).blocks(399, 1) == 50


# -- tenants, deadlines, degrading ------------------------------------------------------------------------------------


def test_quotas_hold_one_tenant_back_and_nobody_else() -> None:
    tenants = {"default": TenantConfig(), "t": TenantConfig(max_concurrency=1, page_quota=5, token_budget=60)}
    world = World(40, replace(PLAIN, tenants=tenants))
    for i in range(2):
        world.submit(f"t{i}", 11, 5, "t")
        world.submit(f"o{i}", 11, 5, "other")
    assert world.planned(world.step()) == {"t0", "o0", "o1"}
    assert world.submit("t2", 25, 10, "t").reason is Reason.QUOTA_IMPOSSIBLE
    assert world.submit("t3", 11, 5, "t").outcome is Outcome.QUEUE
    assert world.submit("t4", 11, 5, "t").reason is Reason.TOKEN_BUDGET
    strict = World(40, replace(PLAIN, tenants={"only": TenantConfig(priority_cap=3)}))
    assert strict.submit("x", 5, tenant="who").reason is Reason.UNKNOWN_TENANT
    strict.submit("y", 5, tenant="only", priority=0)
    assert strict.manager.requests.priority[strict.slot("y")] == 3


def test_fair_queueing_serves_tenants_by_weight() -> None:
    tenants = {"a": TenantConfig(weight=3.0), "b": TenantConfig(weight=1.0)}
    world = World(8, replace(PLAIN, tenants=tenants, max_running=1))
    for i in range(40):
        world.submit(f"a{i}", 8, 4, "a")
        world.submit(f"b{i}", 8, 4, "b")
    order = []
    while len(order) < 40:
        plan = world.plan()
        order += [world.manager.requests.spec(s).tenant for s in plan.admitted]
        world.commit(plan)
    assert 28 <= order.count("a") <= 32


def test_a_minimum_share_goes_before_priority() -> None:
    tenants = {"vip": TenantConfig(), "small": TenantConfig(min_share=0.25)}
    world = World(8, replace(PLAIN, tenants=tenants, max_running=1, aging_rounds=10_000))
    for i in range(60):
        world.submit(f"v{i}", 8, 4, "vip", 0)
        world.submit(f"s{i}", 8, 4, "small", 9)
    started = []
    while len(started) < 40:
        plan = world.plan()
        started += [world.manager.requests.spec(s).tenant for s in plan.admitted]
        world.commit(plan)
    assert started.count("small") >= 8


def test_deadlines_end_requests_and_terminate_victims_past_them() -> None:
    world = World(8)
    assert world.submit("late", 5, deadline=0.0).reason is Reason.DEADLINE
    world.submit("runs", 5, 20, deadline=3.0)
    world.step()
    world.now = 3.0
    plan = world.step()
    assert plan.timed_out == ("runs",)
    assert world.store.available() == 8
    world.submit("victim", 5, 20, deadline=9.0)
    world.step()
    world.now = 9.0
    assert world.manager.preempt(world.slot("victim"), "test").way.value == "terminate"
    assert not len(world.manager.requests)


def test_degrading_needs_scope_and_consent() -> None:
    offer = Offer("streaming_llm", 8, 60, "m1")
    tenants = {"yes": TenantConfig(degrade=True), "no": TenantConfig()}
    config = replace(PLAIN, tenants=tenants, estimator=EstimatorConfig(prior_mean=1.0, prior_weight=1e6))
    for tenant, version, most, degraded in (
        ("yes", "m1", 40, True), ("no", "m1", 40, False), ("yes", "m2", 40, False), ("yes", "m1", 55, False),
    ):  # fmt: skip
        world = World(20, config, offers=(offer,))
        world.submit("first", 30, 30, "no", version="m1")
        world.step()
        world.submit("second", 12, most, tenant, version=version)
        plan = world.step()
        assert ("second" in world.planned(plan)) == degraded
        if degraded:
            for _ in range(20):
                world.step()
            assert len(world.pages("second")) <= 3
            assert world.manager.tenants.blocks.sum() == sum(len(world.pages(i)) for i in ("first", "second"))


def test_retiring_a_model_ends_its_requests_only() -> None:
    world = World(16)
    world.submit("old", 9, version="m1")
    world.submit("new", 9, version="m2")
    world.step()
    assert world.manager.retire("m1") == ("old",)
    assert set(world.manager.requests.index) == {"new"}


def test_victims_are_explained_and_ties_go_to_the_later_arrival() -> None:
    world = World(6)
    for id in ("first", "second", "third"):
        world.submit(id, 3, 20)
    world.step()
    plans = []
    for _ in range(20):
        plans += world.step().preempted
    assert plans[0].id == "third"
    for word in ("priority", "reclaimable", "recompute", "progress", "waiting", "deadline", "frees"):
        assert word in plans[0].why
