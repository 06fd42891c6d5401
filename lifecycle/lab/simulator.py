"""Drives a manager through a workload without a model: the same class the engine drives, with a cost per round.

Rules (those of the shared workloads' figures): one round is one step; a request yields a token in the round that
computes its last known token; what ends in a round gives its pages back before the next one. A swap takes the time of
its bytes on the link, in the round in which it happens, and nothing is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.admission import Outcome
from kvgate.lifecycle.config import RecoveryConfig
from kvgate.lifecycle.lab.workloads import Arrival
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.observer import NullObserver
from kvgate.lifecycle.plan import Plan
from kvgate.lifecycle.recovery import Way
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.states import Spec, State

Floats = NDArray[np.float64]
Cost = Callable[[Plan], float]


STEP_SECONDS = 0.025
"""What one step stands for where a swap has to be charged to it: a decode step of the embedded model."""


def link_seconds(out_blocks: int, in_blocks: int, config: RecoveryConfig) -> float:
    """Time that swapped blocks take on the link, in the round in which they move; nothing is computed meanwhile."""
    moved = out_blocks / config.out_bytes_per_s + in_blocks / config.in_bytes_per_s
    return moved * config.bytes_per_block


def one_step(plan: Plan) -> float:
    """Every round takes one unit of time."""
    return 1.0


@dataclass(frozen=True)
class LinearCost:
    """Milliseconds per round: a base, a part per computed token and a part per row.

    The defaults are those measured for the embedded model on two cores.
    """

    base: float = 20.0
    per_token: float = 0.8
    per_row: float = 4.0

    def __call__(self, plan: Plan) -> float:
        return self.base + self.per_token * float(plan.tokens.sum()) + self.per_row * len(plan.slots)


class Clock:
    """A clock the simulation sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Trail:
    """What happened to each arrival; arrays over the workload, in its order. Times are NaN where it never came to it.

    Attributes:
        first, last, end: time of the first token, the latest token, the end. gap: longest time between two tokens.
        preemptions: times it was a victim. recomputed: tokens computed again. state: how it ended.
    """

    first: Floats
    last: Floats
    end: Floats
    gap: Floats
    preemptions: NDArray[np.int64]
    recomputed: NDArray[np.int64]
    state: list[str]
    rounds: int = 0
    computed: int = 0
    swapped_blocks: int = 0
    link_seconds: float = 0.0
    free_at_end: int = 0
    lowest_free: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, size: int) -> Trail:
        """An empty trail for ``size`` arrivals."""
        nan = np.full(size, np.nan)
        zero = np.zeros(size, np.int64)
        return cls(nan.copy(), nan.copy(), nan.copy(), np.zeros(size), zero, zero.copy(), ["waiting"] * size)

    def token(self, at: int, now: float) -> None:
        """Arrival ``at`` got a token."""
        if np.isnan(self.first[at]):
            self.first[at] = now
        else:
            self.gap[at] = max(self.gap[at], now - self.last[at])
        self.last[at] = now


class _Recorder(NullObserver):
    """Writes the manager's events into a trail."""

    def __init__(self, trail: Trail, index: dict[str, int], clock: Clock) -> None:
        self.trail, self.index, self.clock = trail, index, clock
        self.arrival_of: NDArray[np.int64] = np.zeros(64, np.int64)
        self.moved_out = self.moved_in = 0

    def seat(self, slot: int, arrival: int) -> None:
        """Remember which arrival sits in a slot."""
        if slot >= len(self.arrival_of):
            self.arrival_of = np.pad(self.arrival_of, (0, max(slot + 1, len(self.arrival_of))))
        self.arrival_of[slot] = arrival

    def rejected(self, spec: Spec, reason: str) -> None:
        """Count the reason."""
        self.trail.reasons[reason] = self.trail.reasons.get(reason, 0) + 1

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """Count the victim, and its blocks if they were swapped."""
        self.trail.preemptions[self.index[spec.id]] += 1
        if way == Way.SWAP.value:
            self.trail.swapped_blocks += blocks
            self.moved_out += blocks

    def restored(self, spec: Spec, blocks: int) -> None:
        """Count what came back."""
        self.moved_in += blocks

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """Count tokens."""
        self.trail.computed += int(tokens.sum())
        np.add.at(self.trail.recomputed, self.arrival_of[slots], again)

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """Note how and when it ended."""
        at = self.index[spec.id]
        self.trail.state[at] = state
        self.trail.end[at] = self.clock.now


class Simulation:
    """One workload through one manager.

    Args:
        arrivals: in order of time. make: builds the manager from a clock and an observer, so that the simulation can
            listen. cost: time a round takes. check: called after every round (the audit, in tests).
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        make: Callable[[Clock, NullObserver], Manager],
        cost: Cost = one_step,
        check: Callable[[Manager], None] | None = None,
    ) -> None:
        self.arrivals = arrivals
        self.clock = Clock()
        self.trail = Trail.of(len(arrivals))
        self._index = {a.spec.id: i for i, a in enumerate(arrivals)}
        self._recorder = _Recorder(self.trail, self._index, self.clock)
        self.manager = make(self.clock, self._recorder)
        self._out = np.array([a.out_len for a in arrivals], np.int64)
        self._made = np.zeros(len(arrivals), np.int64)
        self._cost = cost
        self._check = check
        self._next = 0
        order = [i for i, a in enumerate(arrivals) if a.cancel_at is not None]
        self._cancels = sorted(order, key=lambda i: arrivals[i].cancel_at or 0.0)
        self._next_cancel = 0

    def run(self, most_rounds: int = 1_000_000) -> Trail:
        """Until every arrival ended, or nothing moves any more."""
        trail, store = self.trail, self.manager.store
        trail.lowest_free = store.total
        idle = 0
        while trail.rounds < most_rounds and (self._next < len(self.arrivals) or len(self.manager.requests)):
            self._arrive()
            plan = self.manager.plan()
            idle = 0 if len(plan.slots) or plan.timed_out else idle + 1
            trail.lowest_free = min(trail.lowest_free, store.available())
            if not len(plan.slots) and self._next < len(self.arrivals) and not len(self.manager.requests):
                self.clock.now = max(self.clock.now, self.arrivals[self._next].at)
                trail.rounds = int(max(trail.rounds, self.clock.now)) if self._cost is one_step else trail.rounds
                continue
            if idle > 100_000:
                break
            took = self._cost(plan) + self._swaps()
            self._tokens(plan)
            self.clock.now += took
            trail.rounds += 1
            if self._check is not None:
                self._check(self.manager)
        trail.free_at_end = store.available()
        return trail

    def _swaps(self) -> float:
        """Time for what this round moved over the link, in the unit of the cost."""
        seen = self._recorder
        seconds = link_seconds(seen.moved_out, seen.moved_in, self.manager.config.recovery)
        seen.moved_out = seen.moved_in = 0
        self.trail.link_seconds += seconds
        return seconds / STEP_SECONDS if self._cost is one_step else 1000.0 * seconds

    def _arrive(self) -> None:
        now = self.clock.now
        while self._next < len(self.arrivals) and self.arrivals[self._next].at <= now:
            spec = self.arrivals[self._next].spec
            if self.manager.submit(spec).outcome is Outcome.REJECT:
                self.trail.state[self._next] = "rejected"
            else:
                self._recorder.seat(self.manager.requests.index[spec.id], self._next)
            self._next += 1
        while self._next_cancel < len(self._cancels):
            arrival = self.arrivals[self._cancels[self._next_cancel]]
            if arrival.cancel_at is None or arrival.cancel_at > now:
                break
            self.manager.end(arrival.spec.id, State.CANCELLED)
            self._next_cancel += 1

    def _tokens(self, plan: Plan) -> None:
        trail, now = self.trail, self.clock.now
        slots = plan.slots[plan.samples]
        at = self._recorder.arrival_of[slots]
        self._made[at] += 1
        first = np.isnan(trail.first[at])
        trail.first[at[first]] = now
        later = at[~first]
        trail.gap[later] = np.maximum(trail.gap[later], now - trail.last[later])
        trail.last[at] = now
        self.manager.commit(plan, slots[self._made[at] >= self._out[at]].tolist())
