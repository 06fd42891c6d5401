"""How often the exact endpoint disagrees with itself: asked twice, greedily, the same items. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvgate.evals.compare.endpoints.answers import AnswerRecord
from kvgate.evals.stats.intervals import cluster_interval


@dataclass(frozen=True)
class Noise:
    """What asking the exact endpoint twice showed.

    Attributes:
        items: how many were asked twice.
        texts_differ: share of them with any other text.
        score_change: mean of |score - score again|, in [0, 1]; ``upper``: its upper 95 % limit.
    """

    items: int
    texts_differ: float
    score_change: float
    upper: float

    def too_loud(self, margin: float) -> bool:
        """Whether A differs from A by more than the margin: then nothing can be said of B at that margin."""
        return self.score_change > margin


def sample_size(items: int, share: float, least: int) -> int:
    """How many items are asked twice: the share, at least ``least``, at most all."""
    if not 0 < share <= 1:
        raise ValueError(f"--noise-share {share}: use a share above 0 and at most 1")
    return min(items, max(least, math.ceil(items * share)))


def noise_of(first: Sequence[AnswerRecord], again: Sequence[AnswerRecord]) -> Noise:
    """The noise over pairs of answers to the same items, in the same order."""
    assert first, "somebody was asked twice"
    pairs = list(zip(first, again, strict=True))
    differ = sum(_texts(one) != _texts(two) for one, two in pairs)
    changes = [abs(one.score - two.score) for one, two in pairs]
    interval = cluster_interval(changes, [1] * len(changes), 0.95)
    return Noise(len(pairs), differ / len(pairs), sum(changes) / len(changes), interval.upper)


def _texts(record: AnswerRecord) -> tuple[str, ...]:
    return tuple(turn.text for turn in record.turns)
