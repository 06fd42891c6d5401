"""Repetition and length drift of long answers: what ramblings look like in numbers."""

from __future__ import annotations

from collections.abc import Sequence


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
