"""The order of a run, and ``--until-decided``: rounds drawn before the run, a look after each, a stop when all is said.

Items are shuffled over all slices by the plan's seed before the first answer, since a suite or data set may be sorted
in some way: whole clusters, in rounds that each hold their share of every slice. With R clusters in the smallest slice
there are R rounds. So looks see the slices evenly, and no slice can be missed by an early stop. Looking after every
round costs nothing: see :mod:`kvgate.evals.stats.betting`. The exact run's floors are judged by the same kind of test,
so a slice near its floor stays open and keeps in scope. The manifest holds a hash of the order after every round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvgate.evals.data.items import Item, digest
from kvgate.evals.judge.gates import Gate, Grouping
from kvgate.evals.judge.pairs import merged_clusters
from kvgate.evals.judge.sequential import SequentialVerdict
from kvgate.evals.judge.verdict import PAGE_SIZE
from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.plan.cells import Configuration, Shard, shards
from kvgate.evals.plan.config import UntilDecided

Key = tuple[str, str, str]
"""A cluster: suite, protocol and name."""

RULES = {
    "decided": "every question was settled",
    "items": "the next round would have passed the cap in items",
    "minutes": "the cap in minutes was reached; another machine may stop elsewhere",
    "exhausted": "the plan has no more items",
}


def rounds(items: Sequence[Item], gate: Gate, seed: int) -> list[list[Item]]:
    """The items in rounds; suites and protocols stay together inside a round, clusters are never split.

    Every round takes its share of each group of items that the gate's keys tell apart, beginning at a place that the
    seed draws, so that groups smaller than the number of rounds do not all stand in the first ones.
    """
    named = merged_clusters(items)
    clusters: dict[Key, list[Item]] = {}
    for item in items:
        clusters.setdefault((item.suite, item.protocol, named[item.item_hash]), []).append(item)
    groups: dict[tuple[Any, ...], list[Key]] = {}
    slices: Counter[tuple[Any, ...]] = Counter()
    apart: Grouping = tuple(dict.fromkeys(key for keys in gate.groupings for key in keys))
    for key, members in clusters.items():
        groups.setdefault(_slice(members[0], gate, apart), []).append(key)
        slices.update(_slice(members[0], gate, keys) for keys in gate.groupings or ((),))
    least = min(slices.values())
    made: list[list[Key]] = [[] for _ in range(least)]
    for group, keys in groups.items():
        begin = int(digest([seed, list(group)]), 16) / 16**32
        for place, key in enumerate(sorted(keys, key=lambda key: digest([seed, *key]))):
            made[int((place + begin) * least / len(keys)) % least].append(key)
    together = [sorted(keys, key=lambda key: (key[:2], digest([seed, *key]))) for keys in made]
    return [[item for key in keys for item in clusters[key]] for keys in together if keys]


def _slice(item: Item, gate: Gate, keys: Grouping) -> tuple[Any, ...]:
    values = {"task": item.task, "length": item.length, "depth": gate.depth_bin(item.depth)}
    return (item.suite, item.protocol, *((key, values[key]) for key in keys))


def round_shards(
    made: Sequence[Sequence[Item]], found: Sequence[Configuration], batch_rows: int, fingerprint: str
) -> tuple[tuple[Shard, ...], ...]:
    """Shards of each round, counted through."""
    batches: list[tuple[Shard, ...]] = []
    count = 0
    for items in made:
        batch = [replace(shard, index=count + shard.index) for shard in shards(items, found, batch_rows, fingerprint)]
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
class EarlyStopping:
    """Looks after every round and says when to stop.

    The check that the exact run repeats itself comes after the run and can only take verdicts away, so looks assume it.

    Args:
        order: hashes of the items of the whole plan, in the order they are run.
        declared: labels known to be invalid, with the reason. ``named``: the row that the plan is about, if any.
        stopped: of an earlier process that finished, to stop at the same look.
    """

    gate: Gate
    limit: UntilDecided
    order: Sequence[str]
    declared: Mapping[str, str] = field(default_factory=dict)
    stopped: Mapping[str, Any] | None = None
    named: str | None = None
    page_size: int = PAGE_SIZE
    clock: Callable[[], float] = time.monotonic
    items: int = 0
    looks: int = 0
    rule: str = "exhausted"

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._verdict = SequentialVerdict(
            self.gate,
            self.order,
            repeat_identical=True,
            declared=self.declared,
            named=self.named,
            page_size=self.page_size,
        )

    def over(self, batch: Sequence[Shard]) -> bool:
        """Whether the next round would pass the cap in items."""
        found = self.limit.items is not None and self.items + items_in(batch) > self.limit.items
        self.rule = "items" if found else self.rule
        return found

    def look(self, batch: Sequence[Shard], records: Sequence[CellRecord], fresh: bool) -> bool:
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
        rule = "exhausted" if self.items == len(self.order) and self.rule != "decided" else self.rule
        still = tuple(f"{row.label} ({row.protocol})" for row in self._verdict.open_rows)
        found = Stop(rule, RULES[rule], self.items, len(self.order), self.looks, still, rule != "minutes")
        return asdict(found)


def items_in(batch: Sequence[Shard]) -> int:
    """Items of a round."""
    return sum(len(shard.items) for shard in batch)


def describe(stop: Mapping[str, Any]) -> str:
    """One line for readers."""
    still = f"; still open: {', '.join(stop['open'])}" if stop["open"] else ""
    return f"stopped after {stop['items']} of {stop['planned']} items ({stop['looks']} looks): {stop['reason']}{still}"
