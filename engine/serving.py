"""The serving loop: the lifecycle manager decides, the engine computes. The simulator drives the same manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from torch import Tensor

from kvgate.compressors.policy import Policy
from kvgate.engine.engine import Engine
from kvgate.engine.feeding import Feeder, Work
from kvgate.engine.sequence import Sequence
from kvgate.engine.served import Beside, Served
from kvgate.engine.serving_store import EngineStore
from kvgate.engine.shadows import Compared, Shadows
from kvgate.engine.sink import Greedy, Sink
from kvgate.lifecycle.admission import Decision, Offer, Outcome
from kvgate.lifecycle.audit import Finding
from kvgate.lifecycle.config import ManagerConfig
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.observer import Both, NullObserver, Observer
from kvgate.lifecycle.plan import Plan
from kvgate.lifecycle.pool import OutOfPages
from kvgate.lifecycle.prefix.cache import Invalidation
from kvgate.lifecycle.prefix.policies import RetentionPolicy
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.swap.area import HostArea


class _Ends(NullObserver):
    """Writes end states into the callers' records, and remembers whose they are until somebody asks."""

    def __init__(self, requests: dict[str, Served]) -> None:
        self._requests = requests
        self.fresh: list[Served] = []

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """Note the state."""
        served = self._requests[spec.id]
        served.state = State[state.upper()]
        self.fresh.append(served)


class Server:
    """Requests in, tokens out, one engine.

    Args:
        engine: with a page pool of its own; nobody else allocates from it.
        config: the manager's.
        clock: current time in seconds.
        retention: policy of the prefix cache; None switches the cache off.
        area: host swap area; None switches swapping off.
        offers: gated policies for tenants that accept them, with the policy each stands for.
        observer: metrics.
        compared: told what each shadow showed, by the request's id.

    Attributes:
        requests: every request by its id, until :meth:`forget` takes it out.
        discarded: ids whose swapped KV an earlier process had left in ``area``: its requests are gone, so it is too.

    The prefix cache is this process's own: nothing of it is shared with others or outlives a restart.
    """

    def __init__(
        self,
        engine: Engine,
        config: ManagerConfig,
        clock: Callable[[], float],
        *,
        retention: RetentionPolicy | None = None,
        area: HostArea | None = None,
        offers: Iterable[tuple[Offer, Policy]] = (),
        observer: Observer | None = None,
        compared: Callable[[str, Compared], None] = lambda id, compared: None,
    ) -> None:
        if config.page_size != engine.tables.geometry.page_size:
            size = engine.tables.geometry.page_size
            raise ValueError(f"page_size {config.page_size}: the engine's pages have {size} slots; make them equal")
        self.engine = engine
        self.requests: dict[str, Served] = {}
        gated = list(offers)
        self._policies = {o.budget: p for o, p in gated}
        for offer, policy in gated:
            if policy.needs:
                needed = ", ".join(sorted(map(str, policy.needs)))
                raise ValueError(
                    f"offer {offer.policy}: it needs {needed} from the prefill, which serving does not collect"
                )
        self._live: dict[int, Served] = {}
        self.discarded = area.discard() if area is not None else ()
        self.store = EngineStore(engine, self._live.__getitem__, clock, retention, area)
        self._slots: dict[str, int] = {}
        self._ends = _Ends(self.requests)
        seen = self._ends if observer is None else Both(self._ends, observer)
        self.shadows = Shadows(self.store, compared)
        self.feeder = Feeder(self.store, self.shadows, self._switched)
        self.manager = Manager(config, self.store, clock, [o for o, _ in gated], seen)

    def submit(
        self,
        spec: Spec,
        prompt: Several[int],
        stops: Iterable[int] = (),
        adapter: str = "",
        *,
        sink: Sink | None = None,
        policy: Policy | None = None,
        beside: Beside | None = None,
    ) -> Decision:
        """Queue a request. ``spec.prompt_len`` has to be the prompt's length. A rejected one leaves nothing behind.

        ``sink`` chooses its tokens (greedy without one); ``policy`` and ``beside``: see :class:`Served`.
        """
        if spec.prompt_len != len(prompt):
            raise ValueError(f"request {spec.id}: prompt_len is {spec.prompt_len}, the prompt has {len(prompt)} tokens")
        longest = spec.prompt_len + spec.max_tokens
        if longest > self.engine.info.max_positions:
            most = self.engine.info.max_positions
            raise ValueError(f"request {spec.id}: {longest} tokens, the model has {most} positions; ask for fewer")
        decision = self.manager.submit(spec)
        if decision.outcome is not Outcome.REJECT:
            served = Served(spec, tuple(prompt), frozenset(stops), adapter)
            served.sink, served.policy, served.beside = sink or Greedy(), policy, beside
            self.requests[spec.id] = served
            slot = self.manager.requests.index[spec.id]
            self._live[slot], self._slots[spec.id] = served, slot
        return decision

    def forget(self, id: str) -> Served:
        """Take an ended request out of :attr:`requests`. ValueError where it still runs or waits, or is unknown."""
        served = self.requests.get(id)
        if served is None or not served.state.ended:
            what = "unknown" if served is None else served.state.name
            raise ValueError(f"request {id}: it is {what}; only ended requests can be forgotten")
        return self.requests.pop(id)

    def cancel(self, id: str) -> bool:
        """The caller gave up; False where the request has ended already."""
        ended = self.manager.end(id, State.CANCELLED)
        self._note()
        return ended

    def retire(self, model_version: str) -> tuple[str, ...]:
        """A model version goes out of service: its requests fail, its cached prefixes are forgotten at once."""
        ended = self.manager.retire(model_version)
        self.invalidate(model_version=model_version)
        self._note()
        return ended

    def invalidate(self, *, tenant: str | None = None, model_version: str | None = None) -> Invalidation:
        """Forget all cached prefixes of a tenant, a model version, or of both at once.

        No request hits them from now on, and what is being computed at this moment does not enter any more; pages in
        use are freed with their last reader. Running requests go on.
        """
        if self.store.cache is None:
            return Invalidation(0, 0, 0)
        return self.store.cache.invalidate(tenant=tenant, model_version=model_version)

    def audit(self) -> Finding:
        """Account for every page now; :attr:`ManagerConfig.audit_rounds` does it on a schedule."""
        return self.manager.audit()

    def step(self) -> Plan:
        """One round: plan, compute, commit. A row that fails ends alone; if all fail, the first error is raised."""
        self.shadows.fit(len(self.manager.running) + len(self.manager.waiting))
        plan = self.manager.plan()
        self._note(plan)
        for victim in plan.preempted:
            self.shadows.ended(victim.id, "preempted")
        self.shadows.fit(0)
        work = [
            Work(slot, self._live[slot], self._row(slot), self._chunk(slot, count))
            for slot, count in zip(plan.slots.tolist(), plan.tokens.tolist(), strict=True)
        ]
        found = self.feeder.feed(work)
        broken = [error for error in found if isinstance(error, Exception)]
        finished = self._sample(plan, found)
        alive = [slot for slot in plan.slots.tolist() if slot in self._live and slot in self.store.rows]
        self.store.settle(alive, self.manager.requests.account[alive].tolist())
        self._remember(plan, finished)
        self.manager.commit(plan, finished)
        self._note(plan)
        if broken and len(broken) == len(work):
            raise broken[0]
        return plan

    @property
    def busy(self) -> bool:
        """Whether another step has something to do."""
        return len(self.manager.requests) > 0 or self.shadows.writing

    def run(self, most_rounds: int = 100_000) -> None:
        """Until every request has ended."""
        for _ in range(most_rounds):
            if not self.busy:
                return
            self.step()
        raise RuntimeError(f"{len(self.manager.requests)} requests are left after {most_rounds} rounds")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _row(self, slot: int) -> Sequence:
        row = self.store.rows[slot]
        if self.manager.requests.cap[slot] and row.policy is None and row.length >= len(self._live[slot].prompt):
            self._degrade(slot, row)
        return row

    def _chunk(self, slot: int, count: int) -> list[int]:
        return self._live[slot].part(int(self.manager.requests.computed[slot]), count)

    def _switched(self, slot: int) -> None:
        """A row is under its policy now: what it holds or what fills its budget is enough, plus one block."""
        policy = self.store.rows[slot].policy
        assert policy is not None, "no policy took over"
        if policy.budget_shape != "head":
            # A head's pages may grow while others' shrink: what the exact row needs stays promised.
            self.manager.hold_to(slot, 0)
            return
        most = max(self.store.blocks_held(slot), self.manager.blocks_for(policy.budget))
        if policy.decides == "once":
            most += self.manager.blocks_for(self._live[slot].spec.max_tokens)
        self.manager.hold_to(slot, most + 1)

    def _degrade(self, slot: int, row: Sequence) -> None:
        """The prompt is in: from now on the row lives under the smallest gated policy that covers it."""
        spec = self._live[slot].spec
        covering = [o for o in self.manager.offers if o.covers(spec.prompt_len + spec.max_tokens, spec.model_version)]
        policy = self._policies[min(o.budget for o in covering)]
        try:
            self.engine.switch(row, policy)
        except ValueError:
            self.manager.hold_to(slot, 0)  # the policy cannot take this row over: it stays exact
            return
        self._live[slot].degraded = policy
        self._switched(slot)

    def _sample(self, plan: Plan, found: list[Tensor | Exception]) -> list[int]:
        """Choose the next token of each row that yields one; ends the rows that failed. Returns the finished slots."""
        finished = []
        for slot, logits, samples in zip(plan.slots.tolist(), found, plan.samples.tolist(), strict=True):
            served = self._live[slot]
            try:
                if isinstance(logits, OutOfPages) and self.manager.give_way(slot):
                    self.shadows.ended(served.spec.id, "preempted")
                    continue
                if isinstance(logits, Exception):
                    raise logits
                if samples and self._take(served, logits):
                    finished.append(slot)
            except Exception as error:
                served.error = error
                self.manager.end(served.spec.id, State.FAILED)
                self._note()
        return finished

    def _take(self, served: Served, logits: Tensor) -> bool:
        """Choose a token and hand it out; True where it was the last one."""
        if bool(logits.isnan().any()):
            raise ArithmeticError("the model's logits are not numbers")
        token = served.sink.choose(logits, served.fed)
        self.feeder.compare(served, logits, token)
        served.fed.append(token)
        if token in served.stops:
            return True
        served.tokens.append(token)
        return served.sink.take(token, logits)

    def _remember(self, plan: Plan, finished: list[int]) -> None:
        """Computed prompts enter the prefix cache, and what finished rows have computed of their answers."""
        requests = self.manager.requests
        for slot, count in zip(plan.slots.tolist(), plan.tokens.tolist(), strict=True):
            if slot not in self._live or requests.cap[slot]:
                continue  # what a policy is to evict must not stay pinned by the cache
            prompt = int(requests.prompt[slot])
            last = slot in finished or requests.generated[slot] + 1 >= requests.bound[slot]
            if last or requests.computed[slot] < prompt <= requests.computed[slot] + count:
                known = self._live[slot].known()
                self.store.remember(slot, known[: self.store.rows[slot].length] if last else known[:prompt])

    def _note(self, plan: Plan | None = None) -> None:
        """Take ended requests out, and copy the states of those that the plan moved."""
        for served in self._ends.fresh:
            id = served.spec.id
            del self._live[self._slots.pop(id)]
            whole = served.state is State.FINISHED
            self.shadows.ended(id, None if whole else f"the request {served.state.name.lower()}")
        self._ends.fresh.clear()
        if plan is None:
            return
        moved = [*plan.slots.tolist(), *(self._slots.get(v.id) for v in plan.preempted)]
        for slot in moved:
            if slot is not None and slot in self._live:
                self._live[slot].state = State(self.manager.requests.state[slot])
