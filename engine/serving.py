"""The serving loop: the lifecycle manager decides, the engine computes. The simulator drives the same manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

import numpy as np

from kvgate.compressors.policy import Policy
from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence
from kvgate.engine.served import Served
from kvgate.engine.serving_store import EngineStore
from kvgate.lifecycle.admission import Decision, Offer, Outcome
from kvgate.lifecycle.config import ManagerConfig
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.observer import Both, NullObserver, Observer
from kvgate.lifecycle.plan import Plan
from kvgate.lifecycle.prefix.policies import RetentionPolicy
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.swap.area import HostArea


class _Ends(NullObserver):
    """Writes end states into the callers' records."""

    def __init__(self, requests: dict[str, Served]) -> None:
        self._requests = requests

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """Note the state."""
        self._requests[spec.id].state = State[state.upper()]


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
                needed = ", ".join(sorted(policy.needs))
                raise ValueError(
                    f"offer {offer.policy}: it needs {needed} from the prefill, which serving does not collect"
                )
        self._live: dict[int, Served] = {}
        self.store = EngineStore(engine, self._live.__getitem__, clock, retention, area)
        ends = _Ends(self.requests)
        seen = ends if observer is None else Both(ends, observer)
        self.manager = Manager(config, self.store, clock, [o for o, _ in gated], seen)

    def submit(self, spec: Spec, prompt: Several[int], stops: Iterable[int] = (), adapter: str = "") -> Decision:
        """Queue a request. ``spec.prompt_len`` has to be the prompt's length. A rejected one leaves nothing behind."""
        if spec.prompt_len != len(prompt):
            raise ValueError(f"request {spec.id}: prompt_len is {spec.prompt_len}, the prompt has {len(prompt)} tokens")
        longest = spec.prompt_len + spec.max_tokens
        if longest > self.engine.info.max_positions:
            most = self.engine.info.max_positions
            raise ValueError(f"request {spec.id}: {longest} tokens, the model has {most} positions; ask for fewer")
        decision = self.manager.submit(spec)
        if decision.outcome is not Outcome.REJECT:
            served = Served(spec, tuple(prompt), frozenset(stops), adapter)
            self.requests[spec.id] = served
            self._live[self.manager.requests.index[spec.id]] = served
        return decision

    def cancel(self, id: str) -> bool:
        """The caller gave up; False where the request has ended already."""
        ended = self.manager.end(id, State.CANCELLED)
        self._note()
        return ended

    def retire(self, model_version: str) -> tuple[str, ...]:
        """A model version goes out of service: its requests fail, its cached prefixes are forgotten at once."""
        ended = self.manager.retire(model_version)
        if self.store.cache is not None:
            self.store.cache.invalidate(model_version=model_version)
        self._note()
        return ended

    def step(self) -> Plan:
        """One round: plan, compute, commit. An exception in the model fails the rows of the round, nobody else."""
        plan = self.manager.plan()
        self._note()
        if len(plan.slots) == 0:
            self.manager.commit(plan)
            return plan
        slots = plan.slots.tolist()
        rows = [self._row(slot) for slot in slots]
        tokens = [self._chunk(slot, count) for slot, count in zip(slots, plan.tokens.tolist(), strict=True)]
        try:
            logits = self.engine.extend(rows, tokens)
        except Exception:
            self._fail(plan)
            raise
        finished = self._sample(plan, logits.argmax(-1).tolist())
        self.store.settle(slots, self.manager.requests.account[plan.slots].tolist())
        self._remember(plan)
        self.manager.commit(plan, finished)
        self._note()
        return plan

    def run(self, most_rounds: int = 100_000) -> None:
        """Until every request has ended."""
        for _ in range(most_rounds):
            if not len(self.manager.requests):
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
        served = self._live[slot]
        first = int(self.manager.requests.computed[slot])
        return [int(t) for t in served.known()[first : first + count]]

    def _degrade(self, slot: int, row: Sequence) -> None:
        """The prompt is in: from now on the row lives under the smallest gated policy that covers it."""
        spec = self._live[slot].spec
        covering = [o for o in self.manager.offers if o.covers(spec.prompt_len + spec.max_tokens, spec.model_version)]
        row.policy = self._policies[min(o.budget for o in covering)]
        self.engine.settle(row)

    def _sample(self, plan: Plan, chosen: list[int]) -> list[int]:
        finished = []
        for slot, token, samples in zip(plan.slots.tolist(), chosen, plan.samples.tolist(), strict=True):
            if not samples:
                continue
            served = self._live[slot]
            served.fed.append(token)
            if token in served.stops:
                finished.append(slot)
            else:
                served.tokens.append(token)
        return finished

    def _remember(self, plan: Plan) -> None:
        requests = self.manager.requests
        for slot, count in zip(plan.slots.tolist(), plan.tokens.tolist(), strict=True):
            prompt = int(requests.prompt[slot])
            if requests.computed[slot] < prompt <= requests.computed[slot] + count:
                self.store.remember(slot, np.array(self._live[slot].prompt, np.int64))

    def _fail(self, plan: Plan) -> None:
        for slot in plan.slots.tolist():
            self.manager.end(self._live[slot].spec.id, State.FAILED)
        self.manager.commit(plan)
        self._note()

    def _note(self) -> None:
        """Copy the states of live requests out of the manager."""
        for slot, served in list(self._live.items()):
            if served.state.ended:
                del self._live[slot]
            else:
                served.state = State(self.manager.requests.state[slot])
