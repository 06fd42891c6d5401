"""One scheduling round: running rows grow, then waiting requests start; victims where needed.

Order: decode rows get their token first, then prefill chunks in order of admission, then new requests with what is left
of the round's tokens. Nothing is planned for a row before all of its pages are certain, so nothing is rolled back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle import admission, preemption, recovery
from kvgate.lifecycle.admission import Ask, Decision, Offer, Outcome, Reason, Room
from kvgate.lifecycle.config import ManagerConfig
from kvgate.lifecycle.demand import DemandForecast
from kvgate.lifecycle.estimator import LengthEstimator
from kvgate.lifecycle.footprint import Footprint
from kvgate.lifecycle.forecast import Demand, Group
from kvgate.lifecycle.observer import Observer
from kvgate.lifecycle.plan import Plan, Preempted
from kvgate.lifecycle.pool import OutOfPages
from kvgate.lifecycle.preemption import Candidates
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.store import Slots, Store
from kvgate.lifecycle.tenants import Tenants
from kvgate.lifecycle.waiting import Cutoff, WaitingQueue

_QUOTAS = frozenset({Reason.CONCURRENCY, Reason.PAGE_QUOTA})


class Managed(Protocol):
    """What a round reads, and the moves it asks for. It writes nothing else: every array has its owner behind here."""

    config: ManagerConfig
    store: Store
    requests: Requests
    tenants: Tenants
    waiting: WaitingQueue
    estimator: LengthEstimator
    demand: DemandForecast
    footprint: Footprint
    observer: Observer
    offers: tuple[Offer, ...]
    running: Slots
    round: int

    def demote(self, slots: Slots) -> None:
        """Lifted requests stand where their priority puts them."""

    def start(self, slot: int, cap: int = 0, *, lifted: bool = True) -> bool:
        """A waiting request begins to run; True if its KV was restored. Raises OutOfPages, the request waiting on."""

    def preempt(self, slot: int, why: str) -> Preempted:
        """A running request gives up its pages."""

    def grow(self, slots: Slots, blocks: NDArray[np.int64]) -> None:
        """Running requests get more blocks."""

    def launched(self, slots: Slots, ticket: int) -> None:
        """Rows run under a ticket."""

    def bypassed(self, slot: int) -> None:
        """Somebody started before the request in ``slot``."""

    def blocks_needed(self, slots: Slots, fresh: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks while tokens join."""

    def blocks_to_start(self, slot: int) -> int:
        """Blocks a waiting request starts with."""


class Round:
    """State of the round being planned; used once."""

    def __init__(self, manager: Managed, now: float, timed_out: tuple[str, ...]) -> None:
        self.m = manager
        self.now = now
        self.timed_out = timed_out
        self.preempted: list[Preempted] = []
        self.admitted: list[int] = []
        self.restored: list[int] = []
        self.stalled = 0
        self.budget = manager.config.tokens_per_step
        self.rows: Slots = manager.running
        self.tokens = np.zeros(0, np.int32)
        self._demand: dict[int, Demand] = {}
        self._futile: list[tuple[int, int]] = []
        self._least: int | None = None
        self._lifted = 0
        self._cutoff = Cutoff()

    def build(self) -> Plan:
        """The plan, with pages taken and the launch's fence set."""
        self._end_turns()
        self._serve_running()
        if len(self.m.waiting):
            self._admit()
        return self._finish()

    def _end_turns(self) -> None:
        """Lifted requests have had their turn after a while, if somebody really more urgent waits."""
        m, requests = self.m, self.m.requests
        lifted = m.running[requests.rank[m.running] < requests.priority[m.running]]
        over = m.round - requests.since[lifted] >= m.config.preemption.protect_rounds
        over &= requests.priority[lifted] > m.waiting.most_urgent()
        if over.any():
            m.demote(lifted[over])
        held = lifted[~over]
        self._lifted = int(requests.blocks[held].sum())

    def _may_lift(self, slot: int) -> bool:
        """Whether a request that waiting has lifted may start as such: together they have a share of the pool."""
        m = self.m
        if int(m.requests.priority[slot]) <= m.waiting.most_urgent():
            return True
        room = int(m.config.admission.lifted_share * m.store.total)
        return self._lifted == 0 or self._lifted + m.blocks_to_start(slot) <= room

    # -- running rows -----------------------------------------------------------------------------------------------

    def _serve_running(self) -> None:
        requests = self.m.requests
        want = requests.known(self.rows) - requests.computed[self.rows]
        decode = want == 1
        if self.m.footprint.chunk is not None:
            want = np.minimum(want, self.m.footprint.chunk)
        tokens = np.where(decode, 1, 0).astype(np.int32)
        left = max(0, self.budget - int(tokens.sum()))
        if not decode.all():
            before = np.cumsum(np.where(decode, 0, want)) - np.where(decode, 0, want)
            tokens = np.where(decode, 1, np.clip(left - before, 0, want)).astype(np.int32)
        self.tokens = np.where(np.cumsum(tokens) <= self.budget, tokens, 0).astype(np.int32)
        self._take_pages()
        self.budget -= int(self.tokens.sum())

    def _needs(self) -> NDArray[np.int64]:
        needed = self.m.blocks_needed(self.rows, self.tokens.astype(np.int64))
        return np.asarray(np.maximum(0, needed - self.m.requests.blocks[self.rows]), np.int64)

    def _keep_quotas(self) -> None:
        """Rows of a tenant that would hold more than its quota give way to its more senior ones."""
        tenants, requests = self.m.tenants, self.m.requests
        while len(self.rows):
            accounts = requests.account[self.rows]
            needs = np.bincount(accounts, weights=self._needs(), minlength=len(tenants.blocks)).astype(np.int64)
            over = np.flatnonzero((needs > 0) & (tenants.blocks + needs > tenants.page_quota))
            if not len(over):
                return
            account = int(over[0])
            mine = self.rows[accounts == account]
            order = np.lexsort((requests.seq[mine], requests.rank[mine]))
            candidates = self._candidates(mine[order[1:]])
            # What counts is what it holds, whether or not a launch may still touch it.
            candidates = replace(candidates, reclaimable=requests.blocks[candidates.slot].astype(np.int64))
            short = int(tenants.blocks[account] + needs[account] - tenants.page_quota[account])
            victims = preemption.choose(candidates, short, self.m.config.preemption)
            for victim in victims or preemption.choose(candidates, 1, self.m.config.preemption):
                self._drop(victim.slot, f"its tenant's page quota; {victim.why}")

    def _take_pages(self) -> None:
        self._keep_quotas()
        needs = self._needs()
        short = int(needs.sum()) - self.m.store.available()
        if short > 0:
            self.m.observer.short_of_pages(short)
        while short > 0:
            if short <= self.m.store.soon() or not self._preempt_for(short):
                self._stall(needs, short)
                needs = self._needs()
                break
            needs = self._needs()
            short = int(needs.sum()) - self.m.store.available()
        at = np.flatnonzero(needs)
        if len(at):
            self.m.grow(self.rows[at], needs[at])

    def _preempt_for(self, short: int) -> bool:
        """Victims among the running rows, never the most senior one; False where nothing can be reclaimed."""
        requests = self.m.requests
        if len(self.rows) < 2:
            return False
        order = np.lexsort((requests.seq[self.rows], requests.rank[self.rows]))
        victims = preemption.choose(self._candidates(self.rows[order[1:]]), short, self.m.config.preemption)
        for victim in victims:
            self._drop(victim.slot, victim.why)
        return bool(victims)

    def _stall(self, needs: NDArray[np.int64], short: int) -> None:
        """Rows wait a round, latest and least urgent first, until the rest fits into what is free."""
        requests = self.m.requests
        order = np.lexsort((requests.seq[self.rows], requests.rank[self.rows]))[::-1]
        for at in order:
            if short <= 0:
                break
            if needs[at] > 0:
                short -= int(needs[at])
                self.tokens[at] = 0
                self.stalled += 1

    def _drop(self, slot: int, why: str) -> None:
        keep = self.rows != slot
        self.rows, self.tokens = self.rows[keep], self.tokens[keep]
        self.admitted = [a for a in self.admitted if a != slot]
        self.preempted.append(self.m.preempt(slot, why))
        self._demand.clear()

    def _candidates(self, slots: Slots) -> Candidates:
        requests = self.m.requests
        cheapest, again = recovery.cheapest(
            requests.computed[slots], requests.blocks[slots], self.m.store.host_free(), self.m.config.recovery
        )
        return Candidates(
            slot=slots,
            rank=requests.rank[slots],
            seq=requests.seq[slots],
            reclaimable=self.m.store.exclusive(slots),
            recovery=cheapest,
            recompute=again,
            generated=requests.generated[slots].astype(np.int64),
            expected=self.m.estimator.expected(
                requests.account[slots], requests.generated[slots], requests.bound[slots]
            ),
            waited=requests.waited[slots],
            slack=requests.deadline[slots] - self.now,
            preemptions=requests.preemptions[slots],
        )

    # -- waiting requests -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        config = self.m.config.admission
        head: int | None = None
        missed = 0
        cutoff = self._cutoff
        at_quota: Counter[int] = Counter()
        bound_to_wait = {p.id for p in self.preempted}
        for slot in self.m.waiting.candidates(self.m.round, cutoff):
            if self.budget <= 0 or missed > config.bypass_reach:
                break
            if self.m.requests.spec(slot).id in bound_to_wait:
                continue
            if cutoff.lifting and self._is_lifted(slot) and not self._may_lift(slot):
                cutoff.lifting = False
                if not self._stands_first(slot):
                    continue
            decision = self._decide(slot)
            if decision.outcome is Outcome.QUEUE and decision.reason not in _QUOTAS and self._make_room(slot, decision):
                decision = self._decide(slot)
            if decision.outcome in (Outcome.ADMIT, Outcome.DEGRADE):
                if self._start(slot, decision) and head is not None:
                    self.m.bypassed(head)
            elif decision.reason in _QUOTAS:
                # Nobody of this tenant can start where it may run no more; under a page quota a smaller one might.
                account = int(self.m.requests.account[slot])
                at_quota[account] += 1
                if decision.reason is Reason.CONCURRENCY or at_quota[account] > config.bypass_reach:
                    cutoff.close(account)
            else:
                missed += 1
                head = slot if head is None else head
                # Nobody less urgent may pass an overdue request, nor make room where no slot is left.
                if decision.reason is Reason.NO_SLOT or self._overdue(slot):
                    cutoff.lower(int(self.m.requests.priority[slot]))
            if head is not None and self.m.requests.bypassed[head] >= config.max_bypass:
                break

    def _is_lifted(self, slot: int) -> bool:
        return self.m.waiting.level(slot, self.m.round) < int(self.m.requests.priority[slot])

    def _stands_first(self, slot: int) -> bool:
        """Whether nobody who waits is more urgent than it is by its own priority."""
        return int(self.m.requests.priority[slot]) <= self.m.waiting.most_urgent()

    def _level(self, slot: int) -> int:
        if not self._cutoff.lifting:
            return int(self.m.requests.priority[slot])
        return self.m.waiting.level(slot, self.m.round)

    def _overdue(self, slot: int) -> bool:
        if not self._cutoff.lifting:
            return False
        return self.m.waiting.overdue(slot, self.m.round)

    def _ask(self, slot: int) -> tuple[Ask, Room, int]:
        m, requests = self.m, self.m.requests
        account = int(requests.account[slot])
        ask = Ask(m.blocks_to_start(slot), self._level(slot), self._overdue(slot))
        room = Room(
            m.store.total,
            m.store.available(),
            len(m.running),
            m.config.max_running,
            int(m.tenants.running[account]),
            int(m.tenants.blocks[account]),
        )
        return ask, room, account

    def _decide(self, slot: int) -> Decision:
        config = self.m.config.admission
        ask, room, account = self._ask(slot)
        tenant = self.m.tenants.configs[account]
        quota = admission.over_quota(ask, room, tenant)
        if quota is not None:
            return quota
        if tenant.page_quota is not None and not ask.overdue:
            crowded = admission.over_quota_later(self._tenant_peak_with(slot), room, tenant)
            if crowded is not None:
                return crowded
        now = admission.fits_now(ask, room, config)
        if now.outcome is not Outcome.ADMIT:
            return now
        later = admission.fits_later(ask, self._peak_with(slot, 0), room, config)
        if later.outcome is Outcome.ADMIT or not tenant.degrade:
            return later
        cap = self._cap(slot)
        if cap and admission.fits_later(ask, self._peak_with(slot, cap), room, config).outcome is Outcome.ADMIT:
            return Decision(Outcome.DEGRADE, Reason.DEGRADED, f"held to {cap} blocks after its prompt")
        return later

    def _cap(self, slot: int) -> int:
        """Blocks under the smallest gated policy whose verdict covers the request; 0 where none does."""
        spec = self.m.requests.spec(slot)
        longest = spec.prompt_len + spec.max_tokens
        fitting = [o.budget for o in self.m.offers if o.covers(longest, spec.model_version)]
        # One block more than the budget fills: eviction frees whole pages only after the next token stands.
        return int(self.m.footprint.whole(min(fitting))) + 1 if fitting else 0

    def _start(self, slot: int, decision: Decision) -> bool:
        cap = self._cap(slot) if decision.outcome is Outcome.DEGRADE else 0
        try:
            lifted = self._cutoff.lifting and self._is_lifted(slot)
            if self.m.start(slot, cap, lifted=self._cutoff.lifting):
                self.restored.append(slot)
        except OutOfPages:
            return False  # a lost host copy needs more pages than the copy did: the request waits for them
        if lifted:
            self._lifted += int(self.m.requests.blocks[slot])
        alone = np.array([slot])
        self.m.demand.add(alone, self._group(alone), self.m.estimator.survival)
        for level, known in self._demand.items():
            if self.m.requests.rank[slot] <= level:
                self._demand[level] = known + self.m.demand.total(alone)
        requests = self.m.requests
        want = int(requests.prompt[slot] + requests.generated[slot] - requests.computed[slot])
        chunk = min(self.budget, want, self.m.footprint.chunk or want)
        self.budget -= chunk
        self.rows = np.append(self.rows, slot)
        self.tokens = np.append(self.tokens, np.int32(chunk))
        self.admitted.append(slot)
        return True

    # -- expected demand --------------------------------------------------------------------------------------------

    def _group(self, slots: Slots, cap: int | None = None) -> Group:
        requests = self.m.requests
        caps = requests.cap[slots] if cap is None else np.full(len(slots), cap, np.int32)
        return Group(
            requests.account[slots],
            requests.known(slots),
            requests.prompt[slots],
            requests.generated[slots],
            requests.bound[slots],
            caps,
        )

    def _peak_with(self, slot: int, cap: int) -> float:
        """Peak of the demand that this request competes with: its own and that of no less urgent running ones."""
        m, requests = self.m, self.m.requests
        level = int(requests.priority[slot])
        horizon = int(requests.bound[slot])
        if m.demand.stale(m.round, horizon):
            left = requests.bound[m.running] - requests.generated[m.running]
            horizon = max(int(left.max(initial=1)), horizon)
            m.demand.rebuild(m.round, horizon, m.running, self._group(m.running), m.estimator.survival)
            self._demand.clear()
        if level not in self._demand:
            self._demand[level] = m.demand.total(m.running[requests.rank[m.running] <= level])
        total = self._demand[level] + m.demand.of(self._group(np.array([slot]), cap), m.estimator.survival)
        return total.peak(m.config.z)

    def _tenant_peak_with(self, slot: int) -> float:
        """Peak of the demand of the request and of its tenant's running ones; 0 where none of them runs."""
        m, requests = self.m, self.m.requests
        self._peak_with(slot, 0)  # rebuilds the rows if they are too old
        mine = m.running[requests.account[m.running] == requests.account[slot]]
        if not len(mine):
            return 0.0
        one = self._group(np.array([slot]), 0)
        return (m.demand.total(mine) + m.demand.of(one, m.estimator.survival)).peak(m.config.z)

    # -- room for urgent requests -----------------------------------------------------------------------------------

    def _make_room(self, slot: int, decision: Decision) -> bool:
        """Preempt strictly less urgent requests for this one, if that is enough; equals never give way to equals."""
        m, requests = self.m, self.m.requests
        weights = m.config.preemption
        live = m.running
        mine = int(requests.priority[slot])
        if decision.reason is Reason.FORECAST or self._lowest() <= mine:
            return False
        need = self._blocks_short(slot)
        if any(mine >= level and need >= blocks for level, blocks in self._futile):
            return False  # this round's victims did not suffice for less
        # Those of a tenant under its minimum share have their turn too.
        favoured = m.tenants.under_share()[requests.account[live]]
        ripe = ~favoured | (m.round - requests.since[live] >= weights.protect_rounds)
        lower = live[(requests.rank[live] > mine) & ripe]
        if need <= m.store.soon() and len(m.running) < m.config.max_running:
            return False
        victims = preemption.choose(self._candidates(lower), need, weights) if len(lower) else ()
        if not victims:
            self._futile.append((mine, need))
        for victim in victims:
            at = np.flatnonzero(self.rows == victim.slot)
            self.budget += int(self.tokens[at].sum())
            self._drop(victim.slot, f"for more urgent {requests.spec(slot).id}: {victim.why}")
        return bool(victims)

    def _blocks_short(self, slot: int) -> int:
        ask, room, _ = self._ask(slot)
        kept = admission.watermark(ask.level, room.total, self.m.config.admission)
        return max(1, ask.now + kept - room.available)

    def _lowest(self) -> int:
        """The least urgent rank that runs; looked up once a round, so it may name one that has just been preempted."""
        if self._least is None:
            self._least = int(self.m.requests.rank[self.m.running].max(initial=0))
        return self._least

    def _finish(self) -> Plan:
        m, requests = self.m, self.m.requests
        busy = self.tokens > 0
        slots, tokens = self.rows[busy], self.tokens[busy]
        samples = requests.computed[slots] + tokens == requests.known(slots)
        ticket = m.store.launch(self.now, self.now + m.config.fence_timeout)
        m.launched(slots, ticket)
        return Plan(
            m.round,
            ticket,
            slots,
            tokens,
            samples,
            tuple(self.admitted),
            tuple(self.restored),
            tuple(self.preempted),
            self.stalled,
            self.timed_out,
        )
