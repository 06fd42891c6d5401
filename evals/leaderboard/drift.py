"""Repetition and length drift of long answers: what ramblings look like in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvgate.evals.log.records import CellRecord

LONG = 64  # tokens; in a shorter answer a share of repeated 4-grams says little


@dataclass(frozen=True)
class Drift:
    """How the long answers of one policy changed against the exact run's, over the items of one task and length.

    Attributes:
        suite, task, length: the slice; ``length`` is the context's, in tokens.
        answers: answers that are long under the exact run (:data:`LONG` tokens); each turn counts by itself.
        repetition, exact_repetition: mean share of repeated 4-grams, 0 to 1. Listing the same thing again is repetition
            that was asked for, so only the difference means something.
        tokens, exact_tokens: mean length of the answers.
        length_drift: mean over the answers.
        loops, exact_loops: answers that end in a loop.
    """

    suite: str
    task: str
    length: int
    answers: int
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


Answers = list[tuple[Sequence[int], Sequence[int]]]


def drifts(cells: Iterable[CellRecord], exact: Mapping[str, CellRecord], least: int = LONG) -> list[Drift]:
    """One line a suite, task and length with long answers, sorted; empty where no exact answer is long.

    Args:
        cells: of one policy. Turns that follow the exact run's answer (fidelity) wrote nothing of their own.
        exact: item hash to the exact side, as in ``slices.survival``.
        least: tokens an exact answer needs to count as long.
    """
    pairs: dict[tuple[str, str, int], Answers] = {}
    for cell in cells:
        for turn, other in zip(cell.turns, exact[cell.item_hash].turns, strict=True):
            if turn.fidelity is None and len(other.tokens) >= max(1, least):
                pairs.setdefault((cell.suite, cell.task, cell.length), []).append((turn.tokens, other.tokens))
    return [_drift(key, pairs[key]) for key in sorted(pairs)]


def _drift(key: tuple[str, str, int], answers: Answers) -> Drift:
    count = len(answers)
    own, exact = zip(*answers, strict=True)
    return Drift(
        *key,
        answers=count,
        repetition=sum(map(repetition, own)) / count,
        exact_repetition=sum(map(repetition, exact)) / count,
        tokens=sum(map(len, own)) / count,
        exact_tokens=sum(map(len, exact)) / count,
        length_drift=sum(len(one) / len(other) - 1 for one, other in answers) / count,
        loops=sum(loop_start(tokens) is not None for tokens in own),
        exact_loops=sum(loop_start(tokens) is not None for tokens in exact),
    )
