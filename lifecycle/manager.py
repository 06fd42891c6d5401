"""The lifecycle manager: the one place where requests begin, move and end.

Decisions are pure functions in their own files (admission, forecast, preemption, recovery); effects on pages go through
a :class:`~kvgate.lifecycle.store.Store`; the clock is injected. The engine's serving loop and the simulator drive the
same class: ``submit`` and ``end`` at any time, then per round ``plan``, run the plan, ``commit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle import admission, recovery
from kvgate.lifecycle.admission import Decision, Offer, Outcome, Reason
from kvgate.lifecycle.audit import Finding
from kvgate.lifecycle.config import ManagerConfig
from kvgate.lifecycle.demand import DemandForecast
from kvgate.lifecycle.estimator import LengthEstimator
from kvgate.lifecycle.footprint import Footprint
from kvgate.lifecycle.observer import NullObserver, Observer
from kvgate.lifecycle.plan import Plan, Preempted
from kvgate.lifecycle.pool import OutOfPages
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.scheduler import Round
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.store import Slots, Store
from kvgate.lifecycle.tenants import Tenants
from kvgate.lifecycle.waiting import NOBODY, WaitingQueue


class OutOfTurnError(RuntimeError):
    """A call that has to wait: a second plan before the commit, or a call from inside a round being planned."""


class Manager:
    """Requests, tenants, pages: see the module docstring. Not thread safe: one owner drives it.

    Args:
        config: one configuration for every load.
        store: where the pages are.
        clock: current time, in the unit of deadlines and fence time-outs.
        offers: gated eviction policies that tenants which opted in may be degraded to.
        observer: told everything that metrics count.
    """

    def __init__(
        self,
        config: ManagerConfig,
        store: Store,
        clock: Callable[[], float],
        offers: Iterable[Offer] = (),
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.clock = clock
        self.offers = tuple(offers)
        self.observer: Observer = observer or NullObserver()
        self.requests = Requests()
        self.tenants = Tenants(config.tenants, config.fair)
        self.footprint = Footprint(config.page_size, store.windows)
        self.waiting = WaitingQueue(self.requests, self.tenants, config.aging_rounds, config.admission.resume_rounds)
        self.estimator = LengthEstimator(config.estimator)
        self.demand = DemandForecast(
            config.admission.points,
            self.footprint,
            config.admission.forecast_rounds,
            variance=config.z != 0.0,
        )
        self.round = 0
        self.running: Slots = np.zeros(0, np.int64)
        self._exports: dict[int, set[int]] = {}
        self._planned: Plan | None = None
        self._inside: str | None = None

    @property
    def line(self) -> WaitingQueue:
        """The waiting queue, by its older name."""
        return self.waiting

    # -- arrivals and ends ------------------------------------------------------------------------------------------

    def submit(self, spec: Spec) -> Decision:
        """Queue a request or reject it for good, with the reason. Nothing is kept of a rejected one."""
        self._refuse_inside(f"submit of {spec.id}")
        try:
            tenant = self.tenants.limits(spec.tenant)
        except ValueError as error:
            return self._reject(spec, Decision(Outcome.REJECT, Reason.UNKNOWN_TENANT, str(error)))
        if spec.id in self.requests.index:
            detail = f"request {spec.id} is live already"
            return self._reject(spec, Decision(Outcome.REJECT, Reason.DUPLICATE, detail))
        if spec.deadline is not None and spec.deadline <= self.clock():
            return self._reject(spec, Decision(Outcome.REJECT, Reason.DEADLINE, f"deadline {spec.deadline:g} is past"))
        tokens = spec.prompt_len + spec.max_tokens
        # The last token is never fed back, so its KV is never held.
        bound = self.footprint.reaching(tokens - 1, self.config.tokens_per_step)
        decision = admission.at_arrival(bound, self.store.total, self.tenants.spent(spec.tenant), tokens, tenant)
        if decision.outcome is Outcome.REJECT:
            return self._reject(spec, decision)
        account = self._account(spec.tenant)
        priority = max(spec.priority, tenant.priority_cap)
        self.tenants.arrived(account, tokens)
        self.waiting.push(self.requests.add(spec, account, priority, self.clock(), self.round))
        self.observer.submitted(spec)
        return decision

    def end(self, id: str, state: State) -> bool:
        """The one release entry point: finish, cancel, time-out, failure, model retired. Idempotent.

        Gives back everything the request holds in whatever state it is; pages a launch may still touch are fenced.
        Returns False, changing nothing, where the request has already ended.
        """
        if not state.ended:
            raise ValueError(f"request {id}: {state.name} is no end state")
        self._refuse_inside(f"end of {id}")
        slot = self.requests.index.get(id)
        if slot is None:
            return False
        self._end(slot, state)
        return True

    def retire(self, model_version: str) -> tuple[str, ...]:
        """End every live request of a model version that is taken out of service; returns their ids."""
        self._refuse_inside(f"retirement of {model_version}")
        gone = tuple(i for i, s in self.requests.index.items() if self.requests.spec(s).model_version == model_version)
        for id in gone:
            self.end(id, State.FAILED)
        return gone

    def export(self, id: str, ticket: int) -> None:
        """A copy out of a request's pages is in flight under ``ticket``; they are not reused before it is over."""
        self._exports.setdefault(self.requests.index[id], set()).add(ticket)

    # -- one round --------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next round and take the pages it needs.

        Raises OutOfTurnError while the plan before it is not committed: its launch may still run.
        """
        self._refuse_inside("plan")
        if self._planned is not None:
            if len(self._planned.slots):
                raise OutOfTurnError(f"plan: round {self._planned.round} is not over; commit it first")
            self._over(self._planned)
        self.round += 1
        now = self.clock()
        late_pages = self.store.expire(now, self.config.fence_timeout)
        if late_pages:
            self.observer.launch_overdue(late_pages)
        late = self._time_out(now)
        if self.round % self.config.estimator.refresh_rounds == 1 and len(self.tenants.names):
            self._learn()
        if self.config.audit_rounds and self.round % self.config.audit_rounds == 0:
            self.audit()
        self._inside = "a round is being planned"
        try:
            plan = Round(self, now, late).build()
        finally:
            self._inside = None
        self._planned = plan
        if len(plan.slots) == 0 and not len(self.running) and len(self.waiting) and self.config.audit_rounds:
            self.audit()  # nothing moves although nobody runs: pages may have lost their owner
        return plan

    def audit(self) -> Finding:
        """Account for every page; orphans are set aside until no launch may touch them, then given back."""
        finding = self.store.repair()
        self.observer.audited(len(finding.orphans), len(finding.miscounted))
        return finding

    def give_way(self, slot: int) -> bool:
        """A planned row did not fit after all: it is preempted, so that the others go on and it is tried again.

        Returns False, changing nothing, where it runs alone: nobody can make room for it.
        """
        self.observer.out_of_pages(1)
        if len(self.running) < 2:
            return False
        self.preempt(slot, "its pages were not there although they were planned")
        return True

    def commit(self, plan: Plan, finished: Iterable[int] = ()) -> None:
        """The plan ran. ``finished`` are slots whose new token was their last one."""
        requests = self.requests
        self._over(plan)
        # Rows that ended or were cancelled while the launch ran are no longer ours.
        mine = requests.ticket[plan.slots] == plan.ticket
        slots, tokens, samples = plan.slots[mine], plan.tokens[mine], plan.samples[mine]
        before = requests.computed[slots]
        after = before + tokens
        again = np.maximum(0, np.minimum(requests.high[slots], after) - before)
        requests.computed[slots] = after
        requests.high[slots] = np.maximum(requests.high[slots], after)
        requests.generated[slots] += samples
        requests.state[slots] = np.where(samples | (after >= requests.prompt[slots]), State.DECODE, State.PREFILL)
        requests.ticket[slots] = 0
        if len(slots):
            self.tenants.served(requests.account[slots], tokens, samples)
            self.observer.computed(slots, requests, tokens, again)
            self.observer.sampled(slots[samples], requests)
        self._shrink(slots)
        done = {int(s) for s in finished}
        done.update(slots[requests.generated[slots] >= requests.bound[slots]].tolist())
        for slot in done:
            if State(requests.state[slot]).running:
                self.estimator.finished(
                    int(requests.account[slot]), int(requests.generated[slot]), int(requests.bound[slot])
                )
                self._end(slot, State.FINISHED)

    def blocks_for(self, tokens: int) -> int:
        """Whole blocks for ``tokens`` tokens, windows and policies aside."""
        return int(self.footprint.whole(tokens))

    def blocks_needed(self, slots: Slots, fresh: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks each slot needs while ``fresh[i]`` tokens join what is computed: windows and caps counted."""
        requests = self.requests
        computed = requests.computed[slots].astype(np.int64)
        blocks = self.footprint.blocks(computed, fresh)
        cap = requests.cap[slots]
        if cap.any():
            # Several tokens are appended before the policy evicts: they come on top of what it keeps.
            most = cap + np.where(fresh > 1, self.footprint.whole(fresh), 0)
            capped = (cap > 0) & (computed >= requests.prompt[slots])
            blocks = np.where(capped, np.minimum(blocks, most), blocks)
        return np.asarray(blocks, np.int64)

    def hold_to(self, slot: int, cap: int) -> None:
        """From now on a policy keeps the slot's row at ``cap`` blocks at most; 0 for no limit."""
        self.requests.cap[slot] = cap

    def tickets(self, slot: int) -> set[int]:
        """Launches that may still touch the pages of a slot."""
        ticket = int(self.requests.ticket[slot])
        return self._exports.get(slot, set()) | ({ticket} if ticket else set())

    # -- moves the scheduler asks for -------------------------------------------------------------------------------

    def grow(self, slots: Slots, blocks: NDArray[np.int64]) -> None:
        """Hand ``blocks[i]`` more blocks to each running slot. Raises OutOfPages with nothing changed."""
        self.store.grow(slots, blocks, self.requests.account[slots])
        self.requests.blocks[slots] += blocks.astype(np.int32)
        np.add.at(self.tenants.blocks, self.requests.account[slots], blocks)

    def launched(self, slots: Slots, ticket: int) -> None:
        """These rows run under ``ticket``."""
        self.requests.ticket[slots] = ticket

    def bypassed(self, slot: int) -> None:
        """A request started before the one in ``slot``, which was looked at first."""
        self.requests.bypassed[slot] += 1

    def blocks_to_start(self, slot: int) -> int:
        """Blocks a waiting request needs to start: for all it knows, or for what its policy kept of it."""
        requests = self.requests
        known = int(requests.prompt[slot] + requests.generated[slot])
        if requests.state[slot] == State.SWAPPED:
            at = np.array([slot])
            ahead = known - requests.computed[at].astype(np.int64)
            return int(self.blocks_needed(at, ahead)[0])
        return self.footprint.reaching(known, self.config.tokens_per_step)

    def demote(self, slots: Slots) -> None:
        """Running requests that waiting had lifted stand where their priority puts them from now on."""
        self.requests.rank[slots] = self.requests.priority[slots]

    def start(self, slot: int, cap: int = 0, *, lifted: bool = True) -> bool:
        """A waiting request begins to run. Its blocks have been checked for. Returns True if its KV was restored.

        ``cap``: blocks a policy will hold it to after its prompt, 0 for none; one that was swapped out keeps its own.
        ``lifted``: it starts at the level that waiting has lifted it to, if it has.
        """
        requests = self.requests
        level = self.waiting.level(slot, self.round) if lifted else NOBODY
        requests.rank[slot] = min(level, int(requests.priority[slot]))
        account = int(requests.account[slot])
        blocks, reused = self.blocks_to_start(slot), 0
        restored = requests.state[slot] == State.SWAPPED and self._restore(slot, account)
        fresh = requests.high[slot] == 0 and not restored
        known = int(requests.prompt[slot] + requests.generated[slot])
        if not restored:
            requests.cap[slot] = cap
            blocks = self.footprint.reaching(known, self.config.tokens_per_step)
            requests.blocks[slot], requests.computed[slot] = self.store.begin(slot, known, shared=cap == 0)
            reused = int(requests.computed[slot])
        try:
            missing = blocks - int(requests.blocks[slot])
            if missing > 0:
                self.store.grow(np.array([slot]), np.array([missing]), requests.account[slot : slot + 1])
        except OutOfPages:
            self._back_out(slot)
            raise
        self.waiting.remove(slot)
        requests.blocks[slot] = max(blocks, int(requests.blocks[slot]))
        requests.move(slot, State.ADMITTED)
        requests.waited[slot] += self.round - requests.since[slot]
        requests.since[slot] = self.round
        self.tenants.started(account, int(requests.blocks[slot]), int(requests.prompt[slot]) if fresh else 0)
        self.running = np.append(self.running, slot)
        self.observer.started(requests.spec(slot), int(requests.waited[slot]))
        if reused:
            self.observer.reused(requests.spec(slot), reused, own=not fresh)
        return bool(restored)

    def preempt(self, slot: int, why: str) -> Preempted:
        """Take the device pages of a running request: it will be restored, recomputed, or ends past its deadline."""
        requests = self.requests
        spec = requests.spec(slot)
        choice = recovery.decide(
            int(requests.computed[slot]),
            int(requests.blocks[slot]),
            self.store.host_free(),
            float(requests.deadline[slot]) - self.clock(),
            self.config.recovery,
        )
        if choice.way is recovery.Way.TERMINATE:
            self._end(slot, State.TIMED_OUT)
            return Preempted(spec.id, choice.way, f"{why}; {choice.why}")
        tickets = self.tickets(slot)
        # Blocks taken for a token that will now not be computed hold nothing worth moving.
        filled = min(int(requests.blocks[slot]), self.blocks_for(int(requests.computed[slot])))
        swapped = choice.way is recovery.Way.SWAP and filled > 0
        if swapped:
            self._give_back(slot, filled)
            swapped = self.store.swap_out(slot, tickets)
        if not swapped:
            self.store.release(slot, tickets)
            requests.computed[slot] = 0
        way = recovery.Way.SWAP if swapped else recovery.Way.RECOMPUTE
        self.tenants.blocks[requests.account[slot]] -= requests.blocks[slot]
        requests.blocks[slot] = 0
        requests.ticket[slot] = 0
        requests.move(slot, State.SWAPPED if swapped else State.PREEMPTED)
        requests.preemptions[slot] += 1
        requests.since[slot] = self.round
        self.tenants.stopped(int(requests.account[slot]))
        self.running = self.running[self.running != slot]
        self.waiting.push(slot)
        self.observer.preempted(spec, way.value, filled)
        return Preempted(spec.id, way, f"{why}; {choice.why}")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _reject(self, spec: Spec, decision: Decision) -> Decision:
        self.observer.rejected(spec, decision.reason.value)
        return decision

    def _end(self, slot: int, state: State) -> None:
        requests = self.requests
        spec = requests.spec(slot)
        old = State(requests.state[slot])
        requests.move(slot, state)
        account = int(requests.account[slot])
        if old.running:
            self.running = self.running[self.running != slot]
            self.store.release(slot, self.tickets(slot))
            self.tenants.blocks[account] -= requests.blocks[slot]
        else:
            self._unqueue(slot, old)
        self.tenants.left(account, spec.prompt_len + spec.max_tokens, running=old.running)
        self._exports.pop(slot, None)
        requests.ticket[slot] = 0
        requests.blocks[slot] = 0
        self.observer.ended(spec, state.name.lower(), float(self.clock() - requests.arrived[slot]))
        requests.remove(slot)

    def _unqueue(self, slot: int, old: State) -> None:
        # The queue looks a slot up by its tenant and priority, which do not depend on the state just changed.
        self.waiting.remove(slot)
        if old is State.SWAPPED:
            self.store.drop_host(slot)

    def _restore(self, slot: int, account: int) -> bool:
        requests = self.requests
        held = self.store.swap_in(slot, account)
        if held:
            requests.blocks[slot] = held
            self.observer.restored(requests.spec(slot), held)
            return True
        requests.cap[slot] = 0
        requests.computed[slot] = 0
        self.observer.corrupt(requests.spec(slot))
        return False

    def _time_out(self, now: float) -> tuple[str, ...]:
        late = tuple(self.requests.late(now))
        for id in late:
            self.end(id, State.TIMED_OUT)
        return late

    def _learn(self) -> None:
        requests = self.requests
        # Preempted requests have survived what they generated as well; those that never ran tell nothing.
        live = np.concatenate([self.running, np.array(self.waiting.resuming(), np.int64)])
        self.estimator.refresh(requests.account[live], requests.generated[live], requests.bound[live])

    def _shrink(self, slots: Slots) -> None:
        """Rows give back what their policy or their windows no longer need, all they are about to feed counted."""
        requests = self.requests
        if not self.footprint.windowed and not requests.cap[slots].any():
            return
        ahead = requests.known(slots).astype(np.int64) - requests.computed[slots]
        if self.footprint.chunk is not None:
            ahead = np.minimum(ahead, self.footprint.chunk)
        needed = self.blocks_needed(slots, np.maximum(1, ahead))
        spare = requests.blocks[slots] > needed
        for slot, blocks in zip(slots[spare].tolist(), needed[spare].tolist(), strict=True):
            self._give_back(slot, blocks)

    def _give_back(self, slot: int, blocks: int) -> None:
        given = self.store.shrink(slot, blocks, self.tickets(slot))
        self.tenants.blocks[self.requests.account[slot]] -= given
        self.requests.blocks[slot] -= given

    def _account(self, tenant: str) -> int:
        before = len(self.tenants.names)
        known = self.tenants.knows(tenant)
        account = self.tenants.account(tenant, lambda a: self.store.charged(a) > 0)
        self.estimator.account(account)
        if not known and len(self.tenants.names) == before:
            self.estimator.forget(account)
        return account

    def _over(self, plan: Plan) -> None:
        self._refuse_inside("commit")
        if self._planned is not plan:
            raise OutOfTurnError(f"round {plan.round} is not the one being run; commit each plan once")
        self._planned = None
        self.store.signal(plan.ticket)

    def _back_out(self, slot: int) -> None:
        """A start that found no room after all: whatever it took goes back, and the request waits on."""
        requests = self.requests
        self.store.release(slot, ())
        requests.blocks[slot] = requests.computed[slot] = 0
        if requests.state[slot] == State.SWAPPED:
            self.waiting.remove(slot)
            requests.move(slot, State.PREEMPTED)
            self.waiting.push(slot)

    def _refuse_inside(self, what: str) -> None:
        if self._inside is not None:
            raise OutOfTurnError(f"{what}: {self._inside}; ask again when it is over")
