"""``--until-decided``: rounds fixed before the run, a look after each, a stop when nothing is open.

A round holds whole clusters, and every slice of the gate in proportion: with R clusters in the smallest slice there are
R rounds, and a slice of n clusters gives each round n/R of them, rounded. So looks see the slices evenly, and no slice
can be missed by an early stop. Inside a slice clusters come in an order drawn by the plan's seed, since a suite or data
set may be sorted in some way. Looking after every round costs nothing: see :mod:`kvgate.evals.stats.betting`. The
exact run's floors are judged by the same kind of test, so a slice near its floor stays open and keeps in scope.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvgate.evals.data.items import Item, digest
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.pairs import merged_clusters
from kvgate.evals.judge.sequential import SequentialVerdict
from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.plan.cells import Column, Unit, units
from kvgate.evals.plan.config import UntilDecided

RULES = {
    "decided": "every question was settled",
    "items": "the next round would have passed the cap in items",
    "minutes": "the cap in minutes was reached; another machine may stop elsewhere",
    "exhausted": "the plan has no more items",
}


def rounds(items: Sequence[Item], gate: Gate, seed: int) -> list[list[Item]]:
    """The items in rounds; suites and protocols stay together inside a round, clusters are never split."""
    named = merged_clusters(items)
    clusters: dict[tuple[str, str, str], list[Item]] = {}
    for item in items:
        clusters.setdefault((item.suite, item.protocol, named[item.item_hash]), []).append(item)
    slices: dict[tuple[Any, ...], list[tuple[str, str, str]]] = {}
    for key, members in clusters.items():
        slices.setdefault(_slice(members[0], gate), []).append(key)
    least = min(map(len, slices.values()))
    made: list[list[tuple[str, str, str]]] = [[] for _ in range(least)]
    for keys in slices.values():
        for place, key in enumerate(sorted(keys, key=lambda key: digest([seed, *key]))):
            made[place * least // len(keys)].append(key)
    order = {key: place for place, key in enumerate(sorted(clusters, key=lambda key: _first(items, clusters[key])))}
    together = [sorted(keys, key=lambda key: (key[:2], order[key])) for keys in made]
    return [[item for key in keys for item in clusters[key]] for keys in together]


def _slice(item: Item, gate: Gate) -> tuple[Any, ...]:
    values = {"task": item.task, "length": item.length, "depth": gate.depth_bin(item.depth)}
    return (item.suite, item.protocol, *(values[key] for key in gate.slice_by))


def _first(items: Sequence[Item], members: Sequence[Item]) -> int:
    return items.index(members[0])


def round_units(
    made: Sequence[Sequence[Item]], found: Sequence[Column], batch_rows: int, fingerprint: str
) -> tuple[tuple[Unit, ...], ...]:
    """Units of each round, counted through."""
    batches: list[tuple[Unit, ...]] = []
    count = 0
    for items in made:
        batch = [replace(unit, index=count + unit.index) for unit in units(items, found, batch_rows, fingerprint)]
        count += len(batch)
        batches.append(tuple(batch))
    return tuple(batches)


@dataclass(frozen=True)
class Stop:
    """Where and why a run stopped; part of its leaderboard.

    Attributes:
        rule: one of :data:`RULES`; ``reason`` says it in words.
        items, planned: run, and in the plan. ``looks``: rounds.
        open: rows that more items could still have decided.
        deterministic: whether every machine stops here.
    """

    rule: str
    reason: str
    items: int
    planned: int
    looks: int
    open: tuple[str, ...]
    deterministic: bool
    schema_version: int = SCHEMA_VERSION


@dataclass
class Watch:
    """Looks after every round and says when to stop.

    The check that the exact run repeats itself comes after the run and can only take verdicts away, so looks assume it.

    Args:
        declared: labels known to be invalid, with the reason. ``planned``: items of the whole plan.
        stopped: of an earlier process that finished, to stop at the same look.
    """

    gate: Gate
    limit: UntilDecided
    planned: int
    declared: Mapping[str, str] = field(default_factory=dict)
    stopped: Mapping[str, Any] | None = None
    clock: Callable[[], float] = time.monotonic
    items: int = 0
    looks: int = 0
    rule: str = "exhausted"

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._verdict = SequentialVerdict(self.gate, repeat_identical=True, declared=self.declared)

    def over(self, batch: Sequence[Unit]) -> bool:
        """Whether the next round would pass the cap in items."""
        found = self.limit.items is not None and self.items + items_in(batch) > self.limit.items
        self.rule = "items" if found else self.rule
        return found

    def look(self, batch: Sequence[Unit], records: Sequence[CellRecord], fresh: bool) -> bool:
        """Take a round's records and say whether to stop. ``fresh``: run by this process, whose minutes count."""
        self._verdict.feed(records)
        self.items += items_in(batch)
        self.looks += 1
        minutes = (self.clock() - self._begun) / 60
        if self.stopped is not None and self.stopped["looks"] == self.looks:
            self.rule = self.stopped["rule"]
            return self.rule != "exhausted"
        if self._verdict.decided:
            self.rule = "decided"
        elif fresh and self.limit.minutes is not None and minutes >= self.limit.minutes:
            self.rule = "minutes"
        return self.rule != "exhausted"

    @property
    def stop(self) -> dict[str, Any]:
        """What to write down, after the last round."""
        rule = "exhausted" if self.items == self.planned and self.rule != "decided" else self.rule
        still = tuple(f"{row.label} ({row.protocol})" for row in self._verdict.open_rows)
        found = Stop(rule, RULES[rule], self.items, self.planned, self.looks, still, rule != "minutes")
        return asdict(found)


def items_in(batch: Sequence[Unit]) -> int:
    """Items of a round."""
    return sum(len(unit.items) for unit in batch)


def describe(stop: Mapping[str, Any]) -> str:
    """One line for readers."""
    still = f"; still open: {', '.join(stop['open'])}" if stop["open"] else ""
    return f"stopped after {stop['items']} of {stop['planned']} items ({stop['looks']} looks): {stop['reason']}{still}"
