"""Intervals for a number of items fixed beforehand: for tables and competence floors, never for stopping early.

A run that stops early has the limits of :mod:`kvgate.evals.stats.betting` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special


@dataclass(frozen=True)
class Interval:
    """Two-sided limits around an estimate."""

    lower: float
    upper: float


def tango_interval(gained: int, lost: int, pairs: int, confidence: float = 0.90) -> Interval:
    """Score interval for the difference of two paired proportions, (gained - lost) / pairs.

    Args:
        gained: pairs right under the policy only; ``lost``: right under the exact run only; ``pairs``: all pairs.
        confidence: two-sided; 0.90 has the one-sided 95 % limits that a non-inferiority table wants.

    Keeps a positive width with no discordant pair at all, where Wald, t and bootstrap intervals have none.
    Source: Tango (1998), Statistics in Medicine 17, 891-908, equations for the constrained estimate q21; checked in the
    tests against the values in Fagerland, Lydersen & Laake (2014), Statistics in Medicine 33, table II.
    """
    if pairs < 1 or gained < 0 or lost < 0 or gained + lost > pairs:
        raise ValueError(f"tango_interval: {gained} gained and {lost} lost of {pairs} pairs is impossible")
    z = float(special.ndtri(0.5 + confidence / 2.0))

    def score(delta: float) -> float:
        b = -gained - lost + (2 * pairs - gained + lost) * delta
        c = -lost * delta * (1.0 - delta)
        q = (math.sqrt(max(0.0, b * b - 8.0 * pairs * c)) - b) / (4.0 * pairs)
        variance = pairs * (2.0 * q + delta * (1.0 - delta))
        residual = gained - lost - pairs * delta
        return residual / math.sqrt(variance) if variance > 0.0 else math.copysign(math.inf, residual)

    estimate = (gained - lost) / pairs
    lower = -1.0 if estimate == -1.0 else _bisect(lambda delta: score(delta) > z, -1.0, estimate)
    upper = 1.0 if estimate == 1.0 else _bisect(lambda delta: score(delta) > -z, estimate, 1.0)
    return Interval(lower, upper)


def _bisect(before: Callable[[float], bool], low: float, high: float) -> float:
    """Where ``before`` turns from true to false between ``low`` and ``high``."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if before(middle) else (low, middle)
    return 0.5 * (low + high)


def clopper_pearson(right: float, trials: float, confidence: float) -> Interval:
    """Two-sided exact binomial limits; ``right`` and ``trials`` may be effective, hence fractional, numbers.

    Source: Clopper & Pearson (1934), Biometrika 26, 404-413, as quantiles of the beta distribution.
    """
    tail = (1.0 - confidence) / 2.0
    wrong = trials - right
    lower = 0.0 if right <= 0.0 else float(special.betaincinv(right, wrong + 1.0, tail))
    upper = 1.0 if wrong <= 0.0 else float(special.betaincinv(right + 1.0, wrong, 1.0 - tail))
    return Interval(lower, upper)


def cluster_interval(sums: ArrayLike, sizes: ArrayLike, confidence: float = 0.90) -> Interval:
    """Interval for a mean score in [0, 1] over items that come in clusters.

    Args:
        sums: sum of the scores of each cluster, ``[clusters]``; ``sizes``: items of each cluster.
        confidence: two-sided; the lower limit alone holds with ``(1 + confidence) / 2``.

    Clopper-Pearson limits at the effective number of items, p (1 - p) / v, where v is the between-cluster variance of
    the ratio mean, reduced by (z / t)^2 for the few clusters v rests on, and at most the number of items. When
    everything is right or wrong v says nothing; then each cluster counts as one item, so the width is never zero.
    Single right-or-wrong items give the plain Clopper-Pearson interval.
    Source: Korn & Graubard (1998), Survey Methodology 24(2), 193-201.
    """
    y, n = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    clusters, items = y.size, float(n.sum())
    if clusters == 0:
        return Interval(0.0, 1.0)
    mean = float(y.sum()) / items
    effective = _effective_items(y, n, mean, confidence)
    return clopper_pearson(mean * effective, effective, confidence)


def _effective_items(y: np.ndarray, n: np.ndarray, mean: float, confidence: float) -> float:
    clusters, items = y.size, float(n.sum())
    if clusters == items and np.all((y == 0.0) | (y == 1.0)):
        return items
    if clusters == 1 or mean <= 0.0 or mean >= 1.0:
        return float(clusters)
    variance = clusters / (clusters - 1) * float(((y - mean * n) ** 2).sum()) / items**2
    independent = items if variance <= 0.0 else min(items, mean * (1.0 - mean) / variance)
    tail = 0.5 + confidence / 2.0
    shrink = float(special.ndtri(tail) / special.stdtrit(clusters - 1, tail)) ** 2
    return max(1.0, independent * shrink)
