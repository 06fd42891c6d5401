"""Items that depend on each other without saying so. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from kvgate.evals.data.items import Item
from kvgate.evals.judge.pairs import merged_clusters

LONG_SHARE, LONG_TOKENS = 0.5, 128


def require_declared(items: Sequence[Item]) -> None:
    """ValueError where two items of a suite share a long beginning of their contexts but no cluster.

    Long: at least half of the shorter context and :data:`LONG_TOKENS` tokens, not counting what is protected (a system
    prompt that all items have). Such items stand or fall together, and counting each as an observation of its own
    proves what was never measured.
    """
    named = merged_clusters(items)
    for one, other, shared in _alike(items):
        if named[one.item_hash] != named[other.item_hash]:
            raise ValueError(
                f"suite {one.suite}: {one.task}/{one.index} and {other.task}/{other.index} begin with the same "
                f"{shared} tokens of context but have clusters {one.cluster!r:.80} and {other.cluster!r:.80}; items "
                "that share a source count once: give them one cluster"
            )


def joined(items: Sequence[Item]) -> list[Item]:
    """Made items, whose filler may by chance begin with the same prose: those that do get one cluster, the first's."""
    leader: dict[str, str] = {}

    def root(name: str) -> str:
        while name in leader:
            name = leader[name]
        return name

    for one, other, _ in _alike(items):
        first, second = sorted((root(one.cluster), root(other.cluster)))
        if first != second:
            leader[second] = first
    return [replace(item, cluster=root(item.cluster)) if item.cluster in leader else item for item in items]


def _alike(items: Sequence[Item]) -> Iterator[tuple[Item, Item, int]]:
    """Neighbours in order of their tokens, where the items stand that share most, and how much they share."""
    suites: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        suites[item.suite].append(item)
    for suite in sorted(suites):
        for one, other in pairwise(sorted(suites[suite], key=lambda item: item.context)):
            shared = _shared(one, other)
            if shared >= max(LONG_TOKENS, LONG_SHARE * min(len(one.context), len(other.context))):
                yield one, other, shared


def _shared(one: Item, other: Item) -> int:
    """Tokens that both contexts begin with, without those protected in both."""
    both = next(
        (place for place, (a, b) in enumerate(zip(one.context, other.context, strict=False)) if a != b),
        min(len(one.context), len(other.context)),
    )
    protected = {place for start, end in one.protected for place in range(start, min(end, both))}
    return both - len(protected)
