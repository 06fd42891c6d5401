"""The reference scheduler that the shared workloads' figures come from, without a model: counts only.

The rules of vLLM 0.33's scheduler with prefix caching off: running requests in order, first come first served or by
priority; one block of the pool is never used (its null block); a waiting request starts only if its whole prompt fits;
the last running request (or the least urgent one) is preempted and computed again from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgate.lifecycle.lab.simulator import Trail
from kvgate.lifecycle.lab.workloads import Arrival

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True)
class BaselineConfig:
    """Rules of the reference run: ``watermark`` is a fraction of the pool kept free when a request starts."""

    blocks: int = 2000
    page_size: int = 16
    tokens_per_step: int = 2048
    max_running: int = 256
    priority: bool = False
    watermark: float = 0.0


@dataclass
class _Row:
    at: int
    key: tuple[int, float, int]
    prompt: int
    out: int
    computed: int = 0
    high: int = 0
    made: int = 0
    blocks: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.made


class Baseline:
    """One run over a workload whose times are steps; used once."""

    def __init__(self, arrivals: Sequence[Arrival], config: BaselineConfig) -> None:
        self.arrivals = arrivals
        self.config = config
        self.free = config.blocks - 1
        self.waiting: list[_Row] = []
        self.running: list[_Row] = []
        self.plan: dict[int, tuple[_Row, int]] = {}
        self.trail = Trail.of(len(arrivals))
        self._next = 0

    def run(self, most_rounds: int = 100_000) -> Trail:
        """Until everything ended or nothing moves any more."""
        trail = self.trail
        trail.lowest_free = self.free
        while trail.rounds < most_rounds:
            now = float(trail.rounds)
            self._arrive(now)
            self.plan = {}
            left = self.config.tokens_per_step
            left, preempted = self._serve(left)
            if not preempted:
                self._admit(left)
            trail.lowest_free = min(trail.lowest_free, self.free)
            self._finish(now)
            trail.rounds += 1
            if self._next == len(self.arrivals) and not self.running and (not self.waiting or not self.plan):
                break
        trail.free_at_end = self.free
        return trail

    def _arrive(self, now: float) -> None:
        while self._next < len(self.arrivals) and self.arrivals[self._next].at <= now:
            a = self.arrivals[self._next]
            level = a.spec.priority if self.config.priority else 0
            row = _Row(self._next, (level, a.at, self._next), a.spec.prompt_len, a.out_len)
            self.waiting.append(row)
            self._next += 1
        self._sort()
        for queue in (self.waiting, self.running):
            for row in [r for r in queue if self._cancelled(r, now)]:
                queue.remove(row)
                self._end(row, "cancelled", now)

    def _cancelled(self, row: _Row, now: float) -> bool:
        cancel = self.arrivals[row.at].cancel_at
        return cancel is not None and cancel <= now

    def _sort(self) -> None:
        if self.config.priority:
            self.waiting.sort(key=lambda r: r.key)

    def _need(self, row: _Row, tokens: int) -> int:
        return -(-(row.computed + tokens) // self.config.page_size) - row.blocks

    def _take(self, row: _Row, tokens: int) -> None:
        need = self._need(row, tokens)
        self.free -= need
        row.blocks += need
        self.plan[row.at] = (row, tokens)

    def _serve(self, left: int) -> tuple[int, bool]:
        """Tokens for running requests; returns what is left of the budget and whether anyone was preempted."""
        index, preempted = 0, False
        while index < len(self.running) and left > 0:
            row = self.running[index]
            tokens = min(row.known - row.computed, left)
            while self._need(row, tokens) > self.free:
                preempted = True
                victim = max(self.running, key=lambda r: r.key) if self.config.priority else self.running[-1]
                at = self.running.index(victim)
                left += self._preempt(victim)
                index -= at < index
                if victim is row:
                    return left, True
            self._take(row, tokens)
            left -= tokens
            index += 1
        return left, preempted

    def _preempt(self, victim: _Row) -> int:
        self.running.remove(victim)
        planned = self.plan.pop(victim.at, None)
        self.free += victim.blocks
        victim.blocks = victim.computed = 0
        self.trail.preemptions[victim.at] += 1
        self.waiting.insert(0, victim)
        self._sort()
        return planned[1] if planned else 0

    def _admit(self, left: int) -> None:
        kept = int(self.config.watermark * self.config.blocks)
        while self.waiting and left > 0 and len(self.running) < self.config.max_running:
            row = self.waiting[0]
            if self._need(row, row.known) + kept > self.free:
                return
            self.waiting.pop(0)
            self.running.append(row)
            tokens = min(row.known, left)
            self._take(row, tokens)
            left -= tokens

    def _finish(self, now: float) -> None:
        trail = self.trail
        for row, tokens in self.plan.values():
            trail.computed += tokens
            trail.recomputed[row.at] += max(0, min(row.high, row.computed + tokens) - row.computed)
            row.computed += tokens
            row.high = max(row.high, row.computed)
            if row.computed < row.known:
                continue
            row.made += 1
            trail.token(row.at, now)
            if row.made == row.out:
                self.running.remove(row)
                self._end(row, "finished", now)

    def _end(self, row: _Row, state: str, now: float) -> None:
        self.free += row.blocks
        row.blocks = 0
        self.trail.state[row.at] = state
        self.trail.end[row.at] = now
