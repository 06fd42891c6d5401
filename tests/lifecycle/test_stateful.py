"""Random operations on the whole manager, with a model of what must hold after each of them as the oracle.

The oracle knows nothing of fences, heaps or free lists. It keeps, for itself: which requests are live, which pages each
launch in flight may touch, what stands in every cached page, and who references what. ``mutants.py`` breaks the code in
many ways and shows that this test notices.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvgate.lifecycle.admission import Outcome
from kvgate.lifecycle.audit import claims, inspect, repair
from kvgate.lifecycle.config import EstimatorConfig, ManagerConfig, RecoveryConfig, TenantConfig
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.plan import Plan
from kvgate.lifecycle.pool import PageIds, State
from kvgate.lifecycle.prefix.cache import Hold, PrefixCache
from kvgate.lifecycle.prefix.keys import Namespace, blake
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.states import Spec
from kvgate.lifecycle.states import State as Stage
from kvgate.lifecycle.store import FlatStore

PAGES, HOST, TIMEOUT = 40, 25, 50.0
TENANTS = ("a", "b", "c")
CONFIG = ManagerConfig(
    page_size=4,
    tokens_per_step=24,
    max_running=6,
    aging_rounds=5,
    fence_timeout=TIMEOUT,
    audit_rounds=0,  # the store's audit knows its rows only; here forks and holds own pages too
    estimator=EstimatorConfig(prior_mean=0.05, prior_weight=50.0),
    recovery=RecoveryConfig(host_blocks=HOST, prefill_tokens_per_s=50.0, bytes_per_block=1 << 28),
    tenants={"a": TenantConfig(), "b": TenantConfig(max_concurrency=2, page_quota=16), "c": TenantConfig(weight=3.0)},
)
SPACES = tuple(Namespace("v1", tenant, adapter) for tenant in ("a", "b") for adapter in ("", "x"))
# Whose prefix and its tokens; two make a block.
PROMPTS = st.tuples(
    st.sampled_from(SPACES),
    st.one_of(st.lists(st.integers(0, 1), min_size=2, max_size=9), st.lists(st.integers(0, 1), max_size=9)),
)
Ask = tuple[int, int, str, int, int | None, str]
ENDS = (Stage.CANCELLED, Stage.FAILED)
# prompt, most, tenant, priority, slack to the deadline, model version
ASKS = st.tuples(
    st.one_of(st.integers(1, 6), st.integers(1, 40)),
    st.integers(1, 60),
    st.sampled_from(("a", "a", "b", "c", "c", "nobody")),
    st.integers(0, 3),
    st.one_of(st.none(), st.none(), st.integers(-2, 60)),
    st.sampled_from(("v1", "v1", "v1", "v2")),
)


def weak(data: bytes) -> bytes:
    """Three bits of hash: collisions are the rule, so only the token comparison keeps hits right."""
    return bytes([blake(data)[0] & 7]) * 32


class Lifecycle(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(asked=st.lists(ASKS, min_size=4, max_size=8), cached=st.lists(PROMPTS, min_size=2, max_size=3))
    def begin(self, asked: list[Ask], cached: list[tuple[Namespace, list[int]]]) -> None:
        self.now = 0.0
        self.store = FlatStore(PAGES, HOST)
        self.ledger = self.store.ledger
        self.manager = Manager(CONFIG, self.store, lambda: self.now)
        self.cache = PrefixCache(self.ledger, ValueDensity(), 2, lambda: self.now, weak)
        self.next = 0
        self.live: dict[str, Spec] = {}
        self.ended: list[str] = []
        self.plan: Plan | None = None
        self.planned: dict[int, str] = {}
        self.flights: dict[int, tuple[float, set[int]]] = {}
        self.forks: list[PageIds] = []
        self.holds: list[Hold] = []
        self.content: dict[int, tuple[Namespace, bytes]] = {}
        self.forgotten: set[int] = set()
        self.lost: list[int] = []
        self._watch_allocations()
        for prompt in cached:  # without these most runs had nothing to hit
            self.use_prefix(prompt, exact=True)
        self.submit(asked)

    def _watch_allocations(self) -> None:
        real = self.ledger.pool.alloc

        def alloc(count: int) -> PageIds:
            ids = real(count)
            for deadline, touched in self.flights.values():
                if deadline > self.now:
                    assert not touched & set(ids.tolist()), "a page that a launch may touch was given away"
            for page in ids.tolist():
                self.content.pop(page, None)
                self.forgotten.discard(page)
            return ids

        self.ledger.pool.alloc = alloc  # type: ignore[method-assign]

    # -- requests -----------------------------------------------------------------------------------------------------

    @rule(asked=st.lists(ASKS, min_size=2, max_size=5))
    def submit(self, asked: list[Ask]) -> None:
        for prompt, most, tenant, priority, slack, version in asked:
            deadline = None if slack is None else self.now + slack
            spec = Spec(f"r{self.next}", prompt, most, tenant, priority, deadline, version)
            self.next += 1
            blocks = -(-(prompt + most - 1) // 4)
            too_big = blocks > (16 if tenant == "b" else PAGES)
            impossible = tenant == "nobody" or too_big or (slack is not None and slack <= 0)
            decision = self.manager.submit(spec)
            assert (decision.outcome is Outcome.REJECT) == impossible
            if not impossible:
                self.live[spec.id] = spec
                again = self.manager.submit(replace(spec, prompt_len=1))
                assert again.outcome is Outcome.REJECT

    @precondition(lambda self: self.plan is None)
    @rule(rounds=st.integers(1, 5), share=st.floats(0, 1))
    def serve(self, rounds: int, share: float) -> None:
        for _ in range(rounds):
            self.plan_round()
            self.pages_agree()
            self.requests_agree()
            self.commit(share)

    @precondition(lambda self: self.planned and self.plan is not None)
    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        ids = sorted(set(self.planned.values()) & set(self.live))
        if ids:
            id = data.draw(st.sampled_from(ids))
            assert self.manager.end(id, Stage.CANCELLED)
            self._gone(id)
            self.submit([(3, 20, "a", 0, None, "v1")])  # sits down in the slot that has just become free

    @precondition(lambda self: self.plan is None and any(self._running()))
    @rule(data=st.data(), leave=st.booleans())
    def preempt(self, data: st.DataObject, leave: bool) -> None:
        id = data.draw(st.sampled_from(self._running()))
        done = self.manager.preempt(self.manager.requests.index[id], "test")
        assert done.id == id
        if leave and done.way.value != "terminate":
            assert self.manager.end(id, Stage.CANCELLED)
        if leave or done.way.value == "terminate":
            self._gone(id)

    @precondition(lambda self: self.plan is None and any(self._running()))
    @rule(more=st.integers(1, 3))
    def something_urgent(self, more: int) -> None:
        blocks = self.store.available() + more
        if blocks < PAGES:
            self.submit([(4 * blocks - 3, 4, "a", 0, None, "v1")])
            self.plan_round()

    @precondition(lambda self: self.plan is None)
    @rule(more=st.integers(3, 4))
    def crowd_of_one_tenant(self, more: int) -> None:
        """More small requests than tenant b may run at once: alone, the other limits would nearly always bind first."""
        self.submit([(2, 12, "b", 0, None, "v1")] * more)
        self.serve(rounds=2, share=0.0)

    @precondition(lambda self: any(self._running()))
    @rule(data=st.data(), twice=st.booleans())
    def leave_during_an_export(self, data: st.DataObject, twice: bool) -> None:
        id = data.draw(st.sampled_from(self._running()))
        slot = self.manager.requests.index[id]
        for _ in range(1 + twice):
            ticket = self.ledger.fences.launch("export", self.now + TIMEOUT)
            self.manager.export(id, ticket)
            self.flights[ticket] = (self.now + TIMEOUT, set(self.store.held(slot).tolist()))
        if twice:
            del self.flights[ticket]
            self.store.signal(ticket)
        assert self.manager.end(id, Stage.FAILED)
        self._gone(id)

    @precondition(lambda self: self.plan is None)
    @rule()
    def plan_round(self) -> None:
        self.plan = plan = self.manager.plan()
        self.planned = {int(s): self.manager.requests.spec(int(s)).id for s in plan.slots}
        for id in plan.timed_out:
            deadline = self.live[id].deadline
            assert deadline is not None
            assert deadline <= self.now
            self._gone(id)
        assert all(s.deadline is None or s.deadline > self.now for s in self.live.values()), "past its deadline"
        for victim in plan.preempted:
            assert victim.why
            if victim.way.value == "terminate":
                self._gone(victim.id)
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert int(plan.tokens.sum()) <= 24
        touched: set[int] = set()
        for slot in plan.slots.tolist():
            assert self.manager.requests.state[slot] in (Stage.ADMITTED, Stage.PREFILL, Stage.DECODE)
            held = self.store.held(slot)
            ahead = int(self.manager.requests.computed[slot]) + int(plan.tokens[plan.slots == slot][0])
            assert len(held) * 4 >= ahead, "a row was planned without the pages for it"
            touched.update(held.tolist())
        self.flights[plan.ticket] = (self.now + TIMEOUT, touched)

    @precondition(lambda self: self.plan is not None)
    @rule(share=st.floats(0, 1))
    def commit(self, share: float) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        index = self.manager.requests.index
        mine = [s for s in plan.slots[plan.samples].tolist() if index.get(self.planned[s]) == s]
        # A slot may have been given to another request since; the manager must not take that one for this row.
        done = mine[: int(share * share * len(mine))]
        self.flights.pop(plan.ticket)
        before = {id: self._made(id) for id in self.live}
        self.manager.commit(plan, done)
        for slot, id in self.planned.items():
            if index.get(id) == slot:
                sampled = slot in mine
                assert self._made(id) == before[id] + sampled
                assert self._made(id) < self.live[id].max_tokens
            elif id in self.live:
                assert slot in done or before[id] + 1 == self.live[id].max_tokens
                self._gone(id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), state=st.sampled_from(ENDS))
    def cancel(self, data: st.DataObject, state: Stage) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.manager.end(id, state)
        assert not self.manager.end(id, state)
        self._gone(id)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.ended))
        if id not in self.live:
            assert not self.manager.end(id, Stage.FINISHED)

    @precondition(lambda self: self.next % 7 == 6)
    @rule(version=st.sampled_from(("v1", "v2")))
    def retire(self, version: str) -> None:
        expected = {i for i, s in self.live.items() if s.model_version == version}
        assert set(self.manager.retire(version)) == expected
        for id in expected:
            self._gone(id)

    @rule(steps=st.integers(1, 20))
    def wait(self, steps: int) -> None:
        self.now += steps

    # -- launches -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self._running()))
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self._running()))
        slot = self.manager.requests.index[id]
        ticket = self.ledger.fences.launch("export", self.now + TIMEOUT)
        self.manager.export(id, ticket)
        self.flights[ticket] = (self.now + TIMEOUT, set(self.store.held(slot).tolist()))

    @precondition(lambda self: self._other_flights())
    @rule(data=st.data(), twice=st.booleans())
    def signal(self, data: st.DataObject, twice: bool) -> None:
        ticket = data.draw(st.sampled_from(self._other_flights()))
        del self.flights[ticket]
        self.store.signal(ticket)
        if twice:
            self.store.signal(ticket)

    @rule()
    def expire(self) -> None:
        self.store.expire(self.now)
        late = [t for t, (deadline, _) in self.flights.items() if deadline <= self.now]
        assert not set(late) & set(self.ledger.fences.tickets()), "a launch past its deadline still holds pages"
        for ticket in late:
            if self.plan is None or ticket != self.plan.ticket:
                del self.flights[ticket]
                self.store.signal(ticket)  # a late signal changes nothing
        assert len(self.ledger.fences) <= len(self.flights)

    # -- forks and the prefix cache -----------------------------------------------------------------------------------

    @precondition(lambda self: any(self._running()) and len(self.forks) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        slot = self.manager.requests.index[data.draw(st.sampled_from(self._running()))]
        pages = self.store.held(slot).copy()
        self.ledger.share(pages)
        self.forks.append(pages)

    @precondition(lambda self: self.forks)
    @rule(data=st.data())
    def drop_fork(self, data: st.DataObject) -> None:
        pages = self.forks.pop(data.draw(st.integers(0, len(self.forks) - 1)))
        self.cache.returned(self.ledger.release(pages, self._touching(pages)))

    @precondition(lambda self: self.forks)
    @rule(data=st.data())
    def read_fork(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.forks))
        ticket = self.ledger.fences.launch("read", self.now + TIMEOUT)
        self.flights[ticket] = (self.now + TIMEOUT, set(pages.tolist()))

    @precondition(lambda self: self.ledger.pool.free >= 2)
    @rule(count=st.integers(1, 2))
    def two_readers(self, count: int) -> None:
        """Two owners leave, each with a launch of its own in flight over the same pages."""
        pages = self.ledger.alloc(count)
        self.ledger.share(pages)
        for _ in range(2):
            ticket = self.ledger.fences.launch("read", self.now + TIMEOUT)
            self.flights[ticket] = (self.now + TIMEOUT, set(pages.tolist()))
            self.ledger.release(pages, [ticket])

    @precondition(lambda self: len(self.holds) < 4)
    @rule(prompt=PROMPTS, exact=st.sampled_from((True, True, False)))
    def use_prefix(self, prompt: tuple[Namespace, list[int]], exact: bool) -> None:
        space, tokens = prompt
        asked = np.array(tokens, np.int64)
        hold = self._look_up(space, asked)
        missing = len(asked) // 2 - hold.blocks
        if missing > self.ledger.pool.free:
            self.cache.evict(missing - self.ledger.pool.free)
        if missing > self.ledger.pool.free:
            self.cache.release(hold)
            return
        own = self.ledger.alloc(missing)
        held = hold.pages()
        added = self.cache.insert(hold, asked, np.concatenate([held, own]), exact=exact)
        assert exact or added == 0
        for at, page in enumerate(hold.pages().tolist()):
            self.content[page] = (space, asked[: 2 * at + 2].tobytes())
        self.cache.returned(self.ledger.release(own))
        self.holds.append(hold)

    @precondition(lambda self: self.content and len(self.holds) < 6)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """A prompt that was cached before, by its owner and all others; random prompts alone practically never meet."""
        page = data.draw(st.sampled_from(sorted(self.content)))
        space, raw = self.content[page]
        pinned = page in self._in_use() - self.forgotten
        asked = np.frombuffer(raw, np.int64)
        for other in SPACES:
            self.cache.release(self._look_up(other, asked))
        hold = self._look_up(space, asked)
        if pinned:
            assert hold.pages().tolist()[-1:] == [page], "an entry in use was not found"
        self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def drop_hold(self, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.cache.release(hold, tuple(self._touching(hold.pages())))

    @precondition(lambda self: self.holds)
    @rule()
    def read_prefix(self) -> None:
        ticket = self.ledger.fences.launch("read", self.now + TIMEOUT)
        self.flights[ticket] = (self.now + TIMEOUT, set(self.holds[-1].pages().tolist()))

    @precondition(lambda self: self.holds)
    @rule()
    def leave_a_read_behind_and_evict(self) -> None:
        self.read_prefix()
        hold = self.holds.pop()
        self.cache.release(hold, tuple(self._touching(hold.pages())))
        self.cache.evict(PAGES)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        could = self.cache.at_once
        assert self.cache.evict(count) == min(count, could)

    @rule(tenant=st.sampled_from(("a", "b")))
    def invalidate(self, tenant: str) -> None:
        there = {page: n for page, n in self.content.items() if n[0].tenant == tenant}
        in_use = there.keys() & self._in_use() - self.forgotten
        result = self.cache.invalidate(tenant=tenant)
        assert result.in_use == len(in_use), "entries in use were spared"
        assert len(in_use) <= result.dropped <= len(there)
        self.forgotten |= there.keys()
        for space, raw in there.values():
            self.cache.release(self._look_up(space, np.frombuffer(raw, np.int64)))

    # -- faults -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ledger.pool.free >= 2)
    @rule(count=st.integers(1, 2), flying=st.booleans())
    def lose_owner(self, count: int, flying: bool) -> None:
        ids = self.ledger.alloc(count)
        tickets = []
        if flying:
            ticket = self.ledger.fences.launch("lost", self.now + TIMEOUT)
            self.flights[ticket] = (self.now + TIMEOUT, set(ids.tolist()))
            tickets = [ticket]
        found = inspect(self.ledger, claims(PAGES, self._owners()))
        assert found.orphans.tolist() == sorted(ids.tolist())
        repair(self.ledger, found, tickets)
        if flying:
            assert (self.ledger.pool.state[ids] == State.QUARANTINED).all()

    @rule()
    def audit(self) -> None:
        found = inspect(self.ledger, claims(PAGES, self._owners()))
        assert found.clean
        repair(self.ledger, found)

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def requests_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, requests = self.manager, self.manager.requests
        assert set(requests.index) == set(self.live)
        running, waiting = set(manager.running.tolist()), set(manager.waiting)
        assert len(manager.running) == len(running)
        blocks: Counter[int] = Counter()
        queued: Counter[int] = Counter()
        for slot in requests.index.values():
            stage = Stage(requests.state[slot])
            assert (slot in running) == stage.running
            assert (slot in waiting) == stage.waiting
            assert requests.blocks[slot] == len(self.store.held(slot))
            assert (slot in self.store.host) == (stage is Stage.SWAPPED)
            assert stage.running or len(self.store.held(slot)) == 0
            blocks[int(requests.account[slot])] += int(requests.blocks[slot])
            queued[int(requests.account[slot])] += stage.waiting
        assert len(waiting) == len(manager.waiting)
        assert len(self.store.host) == int((requests.state[list(requests.index.values())] == Stage.SWAPPED).sum())
        assert self.store.host_free() >= 0
        for account in range(len(manager.tenants.names)):
            assert manager.tenants.blocks[account] == blocks[account]
            assert manager.tenants.queued[account] == queued[account]
        tokens: Counter[str] = Counter()
        at_once: Counter[str] = Counter()
        for spec in self.live.values():
            tokens[spec.tenant] += spec.prompt_len + spec.max_tokens
            at_once[spec.tenant] += requests.index[spec.id] in running
        for account, name in enumerate(manager.tenants.names):
            assert manager.tenants.tokens[account] == tokens[name]
            limit = CONFIG.tenants[name].max_concurrency
            assert manager.tenants.running[account] == at_once[name]
            assert limit is None or at_once[name] <= limit, "more of a tenant's requests run than it may have"

    @invariant()
    def pages_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.ledger.check()
        self.cache.check()
        pool = self.ledger.pool
        expected = claims(PAGES, self._owners())
        assert (pool.ref == expected).all(), "references do not match the owners"
        assert sum(pool.counts().values()) == PAGES
        for deadline, touched in self.flights.values():
            if deadline > self.now:
                assert not (pool.state[list(touched)] == State.FREE).any(), "a page in flight is free"
        if not self.flights:
            assert self.ledger.fenced == 0, "a fence outlived its launch"
        live = set(self.ledger.fences.tickets())
        assert live <= set(self.flights), "a ticket is outstanding that nobody waits for"
        assert {t for t, (d, _) in self.flights.items() if d > self.now} <= live, "a launch in flight was forgotten"

    def teardown(self) -> None:
        """Everybody leaves: not one page may be missing."""
        if not hasattr(self, "manager"):
            return
        for id in list(self.live):
            self.manager.end(id, Stage.CANCELLED)
        for pages in self.forks:
            self.cache.returned(self.ledger.release(pages))
        for hold in self.holds:
            self.cache.release(hold)
        self.cache.evict(PAGES)
        for ticket in list(self.flights):
            self.store.signal(ticket)
        self.ledger.return_quarantined()
        self.ledger.check()
        assert self.ledger.pool.free == PAGES
        assert self.store.host_free() == HOST
        assert int(self.ledger.charged.sum()) == 0
        assert (self.manager.tenants.running == 0).all()
        assert (self.manager.tenants.queued == 0).all()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _owners(self) -> list[PageIds]:
        rows = [self.store.held(int(s)) for s in np.flatnonzero(self.store.counts)]
        return [*rows, *self.forks, *(h.pages() for h in self.holds)]

    def _look_up(self, space: Namespace, asked: NDArray[np.int64]) -> Hold:
        pinned = self.ledger.pool.ref.copy()
        hold = self.cache.lookup(space, asked)
        pinned[hold.pages()] += 1
        assert (self.ledger.pool.ref == pinned).all(), "a hit was not pinned"
        for at, page in enumerate(hold.pages().tolist()):
            assert self.content[page] == (space, asked[: 2 * at + 2].tobytes()), "a hit on somebody else's tokens"
            assert page not in self.forgotten, "a hit on invalidated entries"
        return hold

    def _in_use(self) -> set[int]:
        return {page for hold in self.holds for page in hold.pages().tolist()}

    def _running(self) -> list[str]:
        return sorted(self.manager.requests.spec(int(s)).id for s in self.manager.running)

    def _other_flights(self) -> list[int]:
        return sorted(t for t in self.flights if self.plan is None or t != self.plan.ticket)

    def _touching(self, pages: PageIds) -> list[int]:
        mine = set(pages.tolist())
        return [t for t, (_, touched) in self.flights.items() if touched & mine]

    def _made(self, id: str) -> int:
        return int(self.manager.requests.generated[self.manager.requests.index[id]])

    def _gone(self, id: str) -> None:
        del self.live[id]
        self.ended.append(id)


def _run(examples: int, steps: int) -> None:
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        # Shrinking a failure takes minutes; the mutants only need to know that there is one.
        phases=[Phase.generate] if "KVGATE_STATEFUL_EXAMPLES" in os.environ else list(Phase),
    )
    run_state_machine_as_test(Lifecycle, settings=profile)


def test_a_few_thousand_operations() -> None:
    _run(int(os.environ.get("KVGATE_STATEFUL_EXAMPLES", "40")), 60)


@pytest.mark.slow
def test_a_hundred_thousand_operations() -> None:
    _run(500, 200)
