"""Fixed-size intervals against published values and at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvgate.evals.stats.intervals import clopper_pearson, cluster_interval, tango_interval


@pytest.mark.parametrize(
    ("gained", "lost", "pairs", "confidence", "lower", "upper"),
    [
        # Bentur et al. 2009, table (1, 1; 7, 12), and Cavo et al. 2012, table (59, 6; 16, 80), both with Tango's limits
        # in Fagerland, Lydersen & Laake (2014); 25 against 28 of 618 is R's PropCIs::scoreci.mp(25, 28, 618, .90).
        (1, 7, 21, 0.95, -0.517, -0.026),
        (6, 16, 161, 0.95, -0.1240, -0.0054),
        (28, 25, 618, 0.90, -0.0148, 0.0247),
    ],
)
def test_tango_published(gained: int, lost: int, pairs: int, confidence: float, lower: float, upper: float) -> None:
    interval = tango_interval(gained, lost, pairs, confidence)
    digits = 3 if pairs == 21 else 4
    assert (round(interval.lower, digits), round(interval.upper, digits)) == (lower, upper)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_tango_is_antisymmetric_and_never_empty(gained: int, lost: int, same: int) -> None:
    pairs = gained + lost + same
    if pairs == 0:
        return
    interval, mirror = tango_interval(gained, lost, pairs), tango_interval(lost, gained, pairs)
    assert interval.lower == pytest.approx(-mirror.upper, abs=1e-9)
    assert -1.0 <= interval.lower < interval.upper <= 1.0
    assert interval.lower <= (gained - lost) / pairs <= interval.upper


def test_tango_without_discordance_has_the_closed_form() -> None:
    """With b = c = 0 the limits are z^2 / (n + z^2)."""
    z2 = stats.norm.ppf(0.95) ** 2
    interval = tango_interval(0, 0, 40)
    assert interval.upper == pytest.approx(z2 / (40 + z2), abs=1e-9)
    assert interval.lower == pytest.approx(-z2 / (40 + z2), abs=1e-9)


@pytest.mark.parametrize(("gained", "lost", "pairs"), [(1, 1, 1), (-1, 0, 5), (0, 0, 0)])
def test_tango_refuses_impossible_counts(gained: int, lost: int, pairs: int) -> None:
    with pytest.raises(ValueError, match="impossible"):
        tango_interval(gained, lost, pairs)


@given(st.integers(1, 60), st.data())
def test_clopper_pearson_equals_scipy(trials: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, trials))
    expected = stats.binomtest(right, trials).proportion_ci(confidence_level=0.9, method="exact")
    interval = clopper_pearson(right, trials, 0.9)
    assert interval.lower == pytest.approx(expected.low, abs=1e-9)
    assert interval.upper == pytest.approx(expected.high, abs=1e-9)


def test_single_items_give_clopper_pearson() -> None:
    scores = np.array([1.0] * 9 + [0.0] * 4)
    assert cluster_interval(scores, np.ones(13)) == clopper_pearson(9, 13, 0.9)


@pytest.mark.parametrize("score", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 5])
def test_all_alike_keeps_a_width(score: float, size: int) -> None:
    """12 of 12 right is not a standard error of 0, and 12 clusters of 5 are 12 observations."""
    interval = cluster_interval(np.full(12, score * size), np.full(12, size))
    assert interval == clopper_pearson(12 * score, 12, 0.9)
    assert interval.upper - interval.lower > 0.2


def test_one_cluster_is_one_observation() -> None:
    assert cluster_interval([50.0], [50.0]) == clopper_pearson(1.0, 1.0, 0.9)


def test_dependent_items_widen() -> None:
    dependent = cluster_interval([5.0, 0.0] * 10, [5.0] * 20)
    independent = cluster_interval([2.0, 3.0] * 10, [5.0] * 20)
    assert dependent.upper - dependent.lower > 1.5 * (independent.upper - independent.lower)


def test_no_data_is_everything() -> None:
    interval = cluster_interval([], [])
    assert (interval.lower, interval.upper) == (0.0, 1.0)


@pytest.mark.parametrize(("mean", "size"), [(0.7, 1), (0.7, 5), (0.95, 5)])
def test_lower_limit_covers_clustered_scores(mean: float, size: int) -> None:
    """One-sided 95 %: in 1,000 runs of 20 clusters that are right or wrong together half of the time."""
    rng = np.random.default_rng(5)
    misses = 0
    for _ in range(1000):
        together = rng.random(20) < 0.5
        whole = size * (rng.random(20) < mean)
        parts = rng.binomial(size, mean, 20)
        misses += cluster_interval(np.where(together, whole, parts), np.full(20, size)).lower > mean
    assert misses / 1000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
