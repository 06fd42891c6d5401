"""The lifecycle manager: the one place where requests begin, move and end.

Decisions are pure functions in their own files (admission, forecast, preemption, recovery); effects on pages go through
a :class:`~kvgate.lifecycle.store.Store`; the clock is injected. The engine's serving loop and the simulator drive the
same class: ``submit`` and ``end`` at any time, then per round ``plan``, run the plan, ``commit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvgate.lifecycle import admission, recovery
from kvgate.lifecycle.admission import Decision, Offer, Outcome, Reason
from kvgate.lifecycle.config import ManagerConfig
from kvgate.lifecycle.estimator import LengthEstimator
from kvgate.lifecycle.line import Line
from kvgate.lifecycle.observer import NullObserver, Observer
from kvgate.lifecycle.outlook import Outlook
from kvgate.lifecycle.plan import Plan, Preempted
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.scheduler import Round
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.store import Slots, Store
from kvgate.lifecycle.tenants import Tenants


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
        self.line = Line(self.requests, self.tenants, config.aging_rounds, config.admission.resume_rounds)
        self.estimator = LengthEstimator(config.estimator)
        self.outlook = Outlook(
            config.admission.points,
            config.page_size,
            config.admission.outlook_rounds,
            variance=config.admission.z != 0.0,
        )
        self.round = 0
        self.running: Slots = np.zeros(0, np.int64)
        self._exports: dict[int, set[int]] = {}
        self._deadlines = 0

    # -- arrivals and ends ------------------------------------------------------------------------------------------

    def submit(self, spec: Spec) -> Decision:
        """Queue a request or reject it for good, with the reason. Nothing is kept of a rejected one."""
        try:
            account = self.tenants.account(spec.tenant)
        except ValueError as error:
            return self._reject(spec, Decision(Outcome.REJECT, Reason.UNKNOWN_TENANT, str(error)))
        tenant = self.tenants.configs[account]
        if spec.id in self.requests.index:
            detail = f"request {spec.id} is live already"
            return self._reject(spec, Decision(Outcome.REJECT, Reason.DUPLICATE, detail))
        if spec.deadline is not None and spec.deadline <= self.clock():
            return self._reject(spec, Decision(Outcome.REJECT, Reason.DEADLINE, f"deadline {spec.deadline:g} is past"))
        tokens = spec.prompt_len + spec.max_tokens
        # The last token is never fed back, so its KV is never held.
        bound = self.blocks_for(tokens - 1)
        decision = admission.at_arrival(bound, self.store.total, int(self.tenants.tokens[account]), tokens, tenant)
        if decision.outcome is Outcome.REJECT:
            return self._reject(spec, decision)
        self.estimator.account(account)
        priority = max(spec.priority, tenant.priority_cap)
        self.tenants.arrived(account, tokens)
        self.line.push(self.requests.add(spec, account, priority, self.clock(), self.round))
        self._deadlines += spec.deadline is not None
        self.observer.submitted(spec)
        return decision

    def end(self, id: str, state: State) -> bool:
        """The one release entry point: finish, cancel, time-out, failure, model retired. Idempotent.

        Gives back everything the request holds in whatever state it is; pages a launch may still touch are fenced.
        Returns False, changing nothing, where the request has already ended.
        """
        if not state.ended:
            raise ValueError(f"request {id}: {state.name} is no end state")
        slot = self.requests.index.get(id)
        if slot is None:
            return False
        self._end(slot, state)
        return True

    def retire(self, model_version: str) -> tuple[str, ...]:
        """End every live request of a model version that is taken out of service; returns their ids."""
        gone = tuple(i for i, s in self.requests.index.items() if self.requests.spec(s).model_version == model_version)
        for id in gone:
            self.end(id, State.FAILED)
        return gone

    def export(self, id: str, ticket: int) -> None:
        """A copy out of a request's pages is in flight under ``ticket``; they are not reused before it is over."""
        self._exports.setdefault(self.requests.index[id], set()).add(ticket)

    # -- one round --------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next round and take the pages it needs."""
        self.round += 1
        now = self.clock()
        self.store.expire(now)
        late = self._time_out(now)
        if self.round % self.config.estimator.refresh_rounds == 1 and len(self.tenants.names):
            self._learn()
        return Round(self, now, late).build()

    def commit(self, plan: Plan, finished: Iterable[int] = ()) -> None:
        """The plan ran. ``finished`` are slots whose new token was their last one."""
        requests = self.requests
        self.store.signal(plan.ticket)
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
        self._shrink_degraded(slots[samples])
        done = {int(s) for s in finished}
        done.update(slots[requests.generated[slots] >= requests.bound[slots]].tolist())
        for slot in done:
            if State(requests.state[slot]).running:
                self.estimator.finished(
                    int(requests.account[slot]), int(requests.generated[slot]), int(requests.bound[slot])
                )
                self._end(slot, State.FINISHED)

    def blocks_for(self, tokens: int) -> int:
        """Whole blocks for ``tokens`` tokens."""
        return -(-tokens // self.config.page_size)

    def tickets(self, slot: int) -> set[int]:
        """Launches that may still touch the pages of a slot."""
        ticket = int(self.requests.ticket[slot])
        return self._exports.get(slot, set()) | ({ticket} if ticket else set())

    # -- moves the scheduler asks for -------------------------------------------------------------------------------

    def start(self, slot: int, cap: int = 0) -> bool:
        """A waiting request begins to run. Its blocks have been checked for. Returns True if its KV was restored."""
        requests = self.requests
        requests.rank[slot] = min(self.line.level(slot, self.round), int(requests.priority[slot]))
        self.line.remove(slot)
        account = int(requests.account[slot])
        restored = requests.state[slot] == State.SWAPPED and self._restore(slot, account)
        fresh = requests.high[slot] == 0 and not restored
        known = int(requests.prompt[slot] + requests.generated[slot])
        if not restored:
            requests.blocks[slot], requests.computed[slot] = self.store.begin(slot, known)
        blocks = self.blocks_for(known)
        missing = blocks - int(requests.blocks[slot])
        if missing > 0:
            self.store.grow(np.array([slot]), np.array([missing]), requests.account[slot : slot + 1])
        requests.blocks[slot] = max(blocks, int(requests.blocks[slot]))
        requests.cap[slot] = cap
        requests.move(slot, State.ADMITTED)
        requests.waited[slot] += self.round - requests.since[slot]
        requests.since[slot] = self.round
        self.tenants.started(account, int(requests.blocks[slot]), int(requests.prompt[slot]) if fresh else 0)
        self.running = np.append(self.running, slot)
        self.observer.started(requests.spec(slot), int(requests.waited[slot]))
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
            self.store.shrink(slot, filled, tickets)
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
        self.line.push(slot)
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
        self._deadlines -= spec.deadline is not None
        self._exports.pop(slot, None)
        requests.ticket[slot] = 0
        requests.blocks[slot] = 0
        self.observer.ended(spec, state.name.lower(), float(self.clock() - requests.arrived[slot]))
        requests.remove(slot)

    def _unqueue(self, slot: int, old: State) -> None:
        # The line looks a slot up by its queue, which does not depend on the state just changed.
        self.line.remove(slot)
        if old is State.SWAPPED:
            self.store.drop_host(slot)

    def _restore(self, slot: int, account: int) -> bool:
        requests = self.requests
        held = self.store.swap_in(slot, account)
        if held:
            requests.blocks[slot] = held
            self.observer.restored(requests.spec(slot), held)
            return True
        requests.computed[slot] = 0
        self.observer.corrupt(requests.spec(slot))
        return False

    def _time_out(self, now: float) -> tuple[str, ...]:
        if not self._deadlines:
            return ()
        late = tuple(i for i, s in self.requests.index.items() if self.requests.deadline[s] <= now)
        for id in late:
            self.end(id, State.TIMED_OUT)
        return late

    def _learn(self) -> None:
        requests = self.requests
        # Preempted requests have survived what they generated as well.
        live = np.concatenate([self.running, np.fromiter(self.line, np.int64, len(self.line))])
        self.estimator.refresh(requests.account[live], requests.generated[live], requests.bound[live])

    def _shrink_degraded(self, slots: Slots) -> None:
        requests = self.requests
        for slot in slots[(requests.cap[slots] > 0) & (requests.blocks[slots] > requests.cap[slots])].tolist():
            cap = int(requests.cap[slot])
            given = self.store.shrink(slot, cap, self.tickets(slot))
            self.tenants.blocks[requests.account[slot]] -= given
            requests.blocks[slot] = cap
