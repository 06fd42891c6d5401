"""Betting e-processes for paired differences, valid however often somebody peeks.

What is observed. Each cluster (items that share a context or a source) gives one difference ``d = policy - exact`` of
its mean scores, in [-1, 1]. Clusters are independent of each other; items inside a cluster may depend on each other
at will.

What is estimated. The mean of ``d`` over clusters, every cluster counting once. With ``weights`` proportional to
cluster sizes it is the mean over items; the two agree where clusters have equal size. The verdict asks for both, so
that neither many small nor a few large clusters can hide a loss.

The test of ``H0: mean <= mu``. For a fraction f in (0, 1) the bet ``lambda = f / (1 + mu)`` gives the wealth

    W_f = prod_i (1 + lambda * w_i * (d_i - mu)),   w_i = size_i / largest size (1 without weights).

As d - mu >= -(1 + mu), every factor is at least 1 - f > 0. Under H0 the expected factor is at most 1, so W_f is a
nonnegative supermartingale that starts at 1, and so is the mean of W_f over a grid of f fixed beforehand. Ville's
inequality: the chance that it ever reaches 1/alpha is at most alpha, at any stopping time.
Source: Waudby-Smith & Ramdas (2024), "Estimating means of bounded random variables by betting", JRSS-B 86(1),
1-27 (capital process, here with a mixture over a grid of bets instead of a predictable bet); Ville (1939).

Non-inferiority at margin m tests mean <= -m with d; a loss of more than m is tested by the mirror, mean <= m with -d.

When clusters come from different slices their expectations differ. If the slices are visited in complete rounds (every
round holds each slice equally often) and one looks only between rounds, the product over a round still expects at
most 1 when the round's average is at most mu (arithmetic against geometric mean), so nothing changes.

The value at the moment of the decision counts, never an earlier maximum: a policy that was good once and is bad later
loses what it had won.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

Floats = NDArray[np.float64]

# The prior over bets, fixed before any data: uniform over eleven fractions of the largest safe bet. Small fractions
# serve noisy pairs (discordance .2), large ones the common case that hardly any pair differs. See ``kvgate prove``.
FRACTIONS: tuple[float, ...] = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)

_EDGE = 1e-9


def log_e_above(values: ArrayLike, mu: float, weights: ArrayLike | None = None) -> float:
    """Log e-value against ``H0: mean <= mu``.

    Args:
        values: one number in [-1, 1] for each cluster, ``[clusters]``; their order does not matter.
        mu: the hypothetical mean, in (-1, 1).
        weights: positive cluster sizes, or None for equal ones. They must be known before the outcomes.

    Returns:
        Natural logarithm of the e-value; 0 without data.
    """
    x, w, counts = _distinct(values, weights)
    return float(_log_mean_exp(_log_factors(x, w, mu) @ counts))


def log_e_pass(differences: ArrayLike, margin: float, weights: ArrayLike | None = None) -> float:
    """Log e-value against "the policy loses ``margin`` or more": large values let it pass."""
    return log_e_above(differences, -margin, weights)


def log_e_block(differences: ArrayLike, margin: float, weights: ArrayLike | None = None) -> float:
    """Log e-value against "the policy loses ``margin`` or less": large values block it."""
    return log_e_above(-np.asarray(differences, dtype=np.float64), margin, weights)


def log_e_positive(values: ArrayLike, lowest: float, weights: ArrayLike | None = None) -> float:
    """Log e-value against ``H0: mean <= 0`` for values of at least ``-lowest``, with ``lowest`` above 0.

    The bets are those of :func:`log_e_above`, scaled so that the lowest value costs the share f of the wealth. Values
    need no upper limit: only a factor below 0 would break the supermartingale.
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    if lowest <= 0.0 or not np.all(np.isfinite(x) & (x >= -lowest - _EDGE)):
        raise ValueError(f"values must be numbers of at least -{lowest}, which must be below 0")
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64).ravel()
    w = w / (w.max() if w.size else 1.0)
    step = w * np.maximum(x, -lowest) / lowest
    return float(_log_mean_exp(np.log1p(np.asarray(FRACTIONS)[:, None] * step[None, :]).sum(axis=1)))


def confidence_bounds(differences: ArrayLike, alpha: float, weights: ArrayLike | None = None) -> tuple[float, float]:
    """Anytime-valid lower and upper limit of the mean difference, each wrong with probability at most ``alpha``.

    The limits invert the two tests above, so ``lower > -m`` exactly when :func:`log_e_pass` reaches ``log(1/alpha)`` at
    m, and ``upper < -m`` exactly when :func:`log_e_block` does. Together they cover with at least ``1 - 2 alpha`` at
    all times at once. Without data: (-1, 1).
    """
    d = np.asarray(differences, dtype=np.float64)
    return _lower_limit(d, alpha, weights), -_lower_limit(-d, alpha, weights)


def log_e_counts(support: ArrayLike, counts: ArrayLike, mu: float) -> Floats:
    """Log e-values against ``H0: mean <= mu`` from counts of distinct values.

    Args:
        support: distinct values in [-1, 1], ``[values]``; ``counts``: how often each occurred, ``[..., values]``.

    Returns:
        One log e-value for each leading index, ``[...]``.
    """
    x = np.asarray(support, dtype=np.float64)
    wealth = np.asarray(counts, dtype=np.float64) @ _log_factors(x, np.ones_like(x), mu).T
    return _log_mean_exp(wealth)


def mean_of_e(log_values: Sequence[float], weights: Sequence[float]) -> float:
    """Log of the weighted mean of e-values, itself an e-value under any dependence.

    Source: Vovk & Wang (2021), "E-values: calibration, combination and applications", Annals of Statistics 49(3).
    """
    terms = [value + math.log(weight) for value, weight in zip(log_values, weights, strict=True) if weight > 0]
    return float(np.logaddexp.reduce(terms)) if terms else -math.inf


def _lower_limit(d: Floats, alpha: float, weights: ArrayLike | None) -> float:
    """Largest mu in [-1, 1] whose ``H0: mean <= mu`` is rejected; the e-value falls as mu rises."""
    x, w, counts = _distinct(d, weights)
    target = math.log(1.0 / alpha)

    def excess(mu: float) -> float:
        return float(_log_mean_exp(_log_factors(x, w, mu) @ counts)) - target

    low, high = -1.0 + _EDGE, 1.0 - _EDGE
    if excess(low) < 0.0:
        return -1.0
    # At the upper edge the e-value of any data is below 1, so the sign changes.
    return float(optimize.brentq(excess, low, high, xtol=_EDGE))


def _distinct(values: ArrayLike, weights: ArrayLike | None) -> tuple[Floats, Floats, Floats]:
    """Distinct (value, weight) pairs and how often each occurs: few in practice, and free of any order."""
    x = np.asarray(values, dtype=np.float64).ravel()
    if not np.all(np.abs(x) <= 1.0):
        raise ValueError("differences must be numbers in [-1, 1]; check the scores, which belong in [0, 1]")
    if weights is None:
        distinct, counts = np.unique(x, return_counts=True)
        return distinct, np.ones_like(distinct), counts.astype(np.float64)
    w = np.asarray(weights, dtype=np.float64).ravel()
    if w.shape != x.shape or not np.all(w > 0.0):
        raise ValueError(f"weights: {w.size} given for {x.size} clusters; give one positive weight each")
    top = w.max() if w.size else 1.0
    pairs, counts = np.unique(np.stack([x, w / top]), axis=1, return_counts=True)
    return pairs[0], pairs[1], counts.astype(np.float64)


def _log_factors(x: Floats, w: Floats, mu: float) -> Floats:
    """``[fractions, clusters]``: log of one factor for each bet."""
    if not -1.0 < mu < 1.0:
        raise ValueError(f"margin {mu}: must lie between -1 and 1; differences of scores cannot leave that range")
    return np.log1p(np.asarray(FRACTIONS)[:, None] * (w * (x - mu) / (1.0 + mu))[None, :])


def _log_mean_exp(log_values: Floats) -> Floats:
    """Log of the mean over the last axis."""
    return np.asarray(np.logaddexp.reduce(log_values, axis=-1) - math.log(log_values.shape[-1]))
