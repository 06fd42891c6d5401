"""Betting e-processes: their guarantees as properties, and against independent computations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvgate.evals.stats.betting import (
    FRACTIONS,
    confidence_bounds,
    log_e_above,
    log_e_block,
    log_e_counts,
    log_e_pass,
    mean_of_e,
)

differences = st.lists(st.floats(-1.0, 1.0, allow_nan=False), max_size=30)
margins = st.floats(0.005, 0.5)


def wealth(values: Sequence[float], mu: float, weights: Sequence[float] | None = None) -> float:
    """The definition, one factor at a time."""
    top = max(weights) if weights else 1.0
    total = 0.0
    for fraction in FRACTIONS:
        product = 1.0
        for index, value in enumerate(values):
            weight = weights[index] / top if weights else 1.0
            product *= 1.0 + fraction / (1.0 + mu) * weight * (value - mu)
        total += product / len(FRACTIONS)
    return total


@given(differences, margins)
def test_equals_the_definition(d: list[float], m: float) -> None:
    assert math.isclose(math.exp(log_e_pass(d, m)), wealth(d, -m), rel_tol=1e-9)
    assert math.isclose(math.exp(log_e_block(d, m)), wealth([-x for x in d], m), rel_tol=1e-9)


@given(st.lists(st.tuples(st.floats(-1.0, 1.0), st.integers(1, 9)), min_size=1, max_size=20), margins)
def test_weights_equal_the_definition(pairs: list[tuple[float, int]], m: float) -> None:
    d, w = [x for x, _ in pairs], [float(size) for _, size in pairs]
    assert math.isclose(math.exp(log_e_pass(d, m, w)), wealth(d, -m, w), rel_tol=1e-9)


@given(differences, margins, st.randoms(use_true_random=False))
def test_order_does_not_matter(d: list[float], m: float, random: object) -> None:
    shuffled = list(d)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert log_e_pass(d, m) == log_e_pass(shuffled, m)
    assert confidence_bounds(d, 0.05) == confidence_bounds(shuffled, 0.05)


@given(st.lists(st.tuples(st.floats(-1.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=20), margins)
def test_better_scores_never_hurt(pairs: list[tuple[float, float]], m: float) -> None:
    worse = [x for x, _ in pairs]
    better = [min(1.0, x + gain) for x, gain in pairs]
    assert log_e_pass(better, m) >= log_e_pass(worse, m) - 1e-9
    assert log_e_block(better, m) <= log_e_block(worse, m) + 1e-9


@given(differences, margins, margins)
def test_wider_margins_are_easier(d: list[float], first: float, second: float) -> None:
    narrow, wide = sorted((first, second))
    assert log_e_pass(d, wide) >= log_e_pass(d, narrow) - 1e-9
    assert log_e_block(d, wide) <= log_e_block(d, narrow) + 1e-9


@given(st.floats(-0.95, 0.95), st.integers(1, 5))
def test_expected_wealth_is_at_most_one_on_the_null(mu: float, steps: int) -> None:
    """Exact expectation over every path of a two-point population with mean mu on the widest support."""
    up = (1.0 + mu) / 2.0
    total = sum(
        up**ups * (1.0 - up) ** (steps - ups) * math.comb(steps, ups) * wealth([1.0] * ups + [-1.0] * (steps - ups), mu)
        for ups in range(steps + 1)
    )
    assert total <= 1.0 + 1e-9


@given(differences, margins)
def test_limits_and_tests_agree(d: list[float], m: float) -> None:
    lower, upper = confidence_bounds(d, 0.05)
    wanted = math.log(20.0)
    assume(abs(log_e_pass(d, m) - wanted) > 1e-6 and abs(log_e_block(d, m) - wanted) > 1e-6)
    assert (lower > -m) == (log_e_pass(d, m) > wanted)
    assert (upper < -m) == (log_e_block(d, m) > wanted)


@given(differences.filter(bool))
def test_limits_hold_the_mean_and_have_width(d: list[float]) -> None:
    lower, upper = confidence_bounds(d, 0.05)
    assert -1.0 <= lower < upper <= 1.0
    assert lower <= np.mean(d) + 1e-6
    assert upper >= np.mean(d) - 1e-6


def test_nothing_seen_says_nothing() -> None:
    assert confidence_bounds([], 0.05) == (-1.0, 1.0)
    assert log_e_pass([], 0.03) == pytest.approx(0.0)


def test_no_loss_on_forty_items_does_not_prove_two_points() -> None:
    """Where a t-test or bootstrap has zero width and enables."""
    assert log_e_pass([0.0] * 40, 0.02) < math.log(20.0)
    assert confidence_bounds([0.0] * 40, 0.05)[0] < -0.05


def test_counts_equal_values() -> None:
    rng = np.random.default_rng(0)
    support = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    counts = rng.integers(0, 20, size=(3, 4, 5))
    table = log_e_counts(support, counts, -0.1)
    for index in np.ndindex(3, 4):
        values = np.repeat(support, counts[index])
        assert table[index] == pytest.approx(log_e_above(values, -0.1))


def test_large_clusters_count_more_only_with_weights() -> None:
    d, sizes = [0.0] * 30 + [-1.0] * 3, [1.0] * 30 + [10.0] * 3
    assert log_e_block(d, 0.2, sizes) > log_e_block(d, 0.2)


def test_mean_of_e_ignores_dead_strata() -> None:
    assert mean_of_e([math.log(40.0), -math.inf], [0.5, 0.5]) == pytest.approx(math.log(20.0))
    assert mean_of_e([], []) == -math.inf


@pytest.mark.parametrize("bad", [[1.5], [float("nan")], [-2.0]])
def test_impossible_differences_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        log_e_pass(bad, 0.03)


def test_impossible_margins_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        log_e_pass([0.0], 1.0)
    with pytest.raises(ValueError, match="weights"):
        log_e_pass([0.0, 0.0], 0.1, [1.0])
    with pytest.raises(ValueError, match="weights"):
        log_e_pass([0.0], 0.1, [0.0])


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_coverage_holds_at_every_look(seed: int) -> None:
    """300 sequences of a skewed population, looked at after every item: at most alpha miss on each side, with slack."""
    rng = np.random.default_rng(seed)
    support, mean = np.array([-1.0, 0.0, 1.0]), -0.05
    drawn = rng.multinomial(1, [0.06, 0.93, 0.01], size=(300, 200)).cumsum(axis=1)
    above = (log_e_counts(support, drawn, mean) >= math.log(20.0)).any(axis=1)
    below = (log_e_counts(-support, drawn, -mean) >= math.log(20.0)).any(axis=1)
    assert above.mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)
    assert below.mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)
