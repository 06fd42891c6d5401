"""Repetition and length drift of long answers: what ramblings look like in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvgate.evals.records import EXACT, CellRecord

LONG = 64  # tokens; in a shorter answer a share of repeated 4-grams says little


@dataclass(frozen=True)
class Drift:
    """How the long answers of one policy changed against the exact run's, over the items of one task and length.

    Attributes:
        label, suite, task, length: the policy's label and the slice; ``length`` is the context's, in tokens.
        items: answers that are long under the exact run (:data:`LONG` tokens); each turn counts by itself.
        repetition, exact_repetition: mean share of repeated 4-grams, 0 to 1. Listing the same thing again is repetition
            that was asked for, so only the difference means something.
        tokens, exact_tokens: mean length of the answers.
        length_drift: mean over the answers.
        loops, exact_loops: answers that end in a loop.
    """

    label: str
    suite: str
    task: str
    length: int
    items: int
    repetition: float
    exact_repetition: float
    tokens: float
    exact_tokens: float
    length_drift: float
    loops: int
    exact_loops: int


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that repeat an earlier one, 0 to 1 (seq-rep-n of Welleck et al. 2019, arXiv:1908.04319).

    0 for an answer of fewer than ``n`` tokens.
    """
    if n < 1:
        raise ValueError(f"repetition: n is {n}; use 1 or more")
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loop_start(tokens: Sequence[int], longest: int = 64, times: int = 3) -> int | None:
    """Where the answer begins to end in a loop: the last ``times`` or more repeats of a period up to ``longest``."""
    for period in range(1, min(longest, len(tokens) // times) + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= times * period:
            return start
    return None


def length_drift(policy: int, exact: int) -> float | None:
    """Relative change of the answer's length, ``policy / exact - 1``; None where the exact answer is empty."""
    return policy / exact - 1 if exact else None


Answers = list[tuple[Sequence[int], Sequence[int]]]


def drifts(records: Iterable[CellRecord], least: int = LONG) -> list[Drift]:
    """One line a policy, task and length with long answers, sorted; empty where no exact answer is long.

    Args:
        records: of one run. Items without an exact record are left out.
        least: tokens an exact answer needs to count as long.
    """
    found = list(records)
    exact = {(record.item_hash, record.protocol): record for record in found if record.label == EXACT}
    pairs: dict[tuple[str, str, str, int], Answers] = {}
    for record in found:
        against = exact.get((record.item_hash, record.protocol))
        if record.label == EXACT or against is None:
            continue
        for turn, other in zip(record.turns, against.turns, strict=True):
            if len(other.tokens) >= max(1, least):
                key = (record.label, record.suite, record.task, record.length)
                pairs.setdefault(key, []).append((turn.tokens, other.tokens))
    return [_drift(key, pairs[key]) for key in sorted(pairs)]


def _drift(key: tuple[str, str, str, int], answers: Answers) -> Drift:
    count = len(answers)
    own, exact = zip(*answers, strict=True)
    return Drift(
        *key,
        items=count,
        repetition=sum(map(repetition, own)) / count,
        exact_repetition=sum(map(repetition, exact)) / count,
        tokens=sum(map(len, own)) / count,
        exact_tokens=sum(map(len, exact)) / count,
        length_drift=sum(len(one) / len(other) - 1 for one, other in answers) / count,
        loops=sum(loop_start(tokens) is not None for tokens in own),
        exact_loops=sum(loop_start(tokens) is not None for tokens in exact),
    )
