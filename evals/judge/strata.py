"""Rules 2 to 4 on one suite or slice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.judge.columns import Columns, Indices
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.types import Levels, StratumResult, StratumStatus
from kvgate.evals.stats.betting import confidence_bounds, log_e_block, log_e_pass, log_e_positive, mean_of_e
from kvgate.evals.stats.dependence import intra_cluster_correlation
from kvgate.evals.stats.intervals import cluster_interval, tango_interval

TABLE_CONFIDENCE = 0.90  # two-sided: 95 % on each side, like the anytime-valid limits beside it
_UNKNOWN = math.nan


@dataclass(frozen=True)
class Stratum:
    """Items judged together; ``keys`` is empty for a suite."""

    data: Columns
    keys: Mapping[str, Any]
    items: Indices

    @property
    def suite(self) -> str:
        """Name of its suite."""
        return self.data.suite

    @property
    def name(self) -> str:
        """ "retrieval, length 1024, depth 0.2-0.4"."""
        return ", ".join([self.suite, *(f"{key} {value}" for key, value in self.keys.items() if value is not None)])


@dataclass(frozen=True)
class Clustered:
    """Sums over clusters, all float64 ``[clusters]``, in order of cluster name."""

    sizes: NDArray[np.float64]
    exact: NDArray[np.float64]
    policy: NDArray[np.float64]

    @property
    def differences(self) -> NDArray[np.float64]:
        """Difference of cluster means, in [-1, 1]."""
        return np.clip((self.policy - self.exact) / self.sizes, -1.0, 1.0)

    @property
    def weightings(self) -> tuple[NDArray[np.float64] | None, ...]:
        """Clusters counting alike, and by their sizes unless these are equal."""
        return (None,) if np.all(self.sizes == self.sizes[0]) else (None, self.sizes)


def clustered(stratum: Stratum) -> Clustered:
    """Sums over clusters."""
    data, items = stratum.data, stratum.items
    _, place = np.unique(data.layout.clusters[items], return_inverse=True)
    return Clustered(
        np.bincount(place).astype(np.float64),
        np.bincount(place, weights=data.exact[items]).astype(np.float64),
        np.bincount(place, weights=data.policy[items]).astype(np.float64),
    )


def judge(
    stratum: Stratum, gate: Gate, margin: float, least_items: int, least_clusters: int, levels: Levels
) -> StratumResult:
    """Numbers and status of a stratum with at least one pair.

    Every e-value is the smaller of the two weightings, so a claim holds for the mean over clusters and over items.
    """
    data = clustered(stratum)
    d, weightings = data.differences, data.weightings
    floor = gate.floor_of(stratum.suite)
    exact_low, out_below = _competence(data, gate, levels.sequential)
    numbers: dict[str, Any] = {
        "items": int(stratum.items.size),
        "clusters": len(d),
        "exact": float(np.mean(data.exact / data.sizes)),
        "policy": float(np.mean(data.policy / data.sizes)),
        "difference": float(np.mean(d)),
        "difference_items": float((data.policy - data.exact).sum() / data.sizes.sum()),
        "exact_low": exact_low,
        "margin": margin,
        "floor": floor,
        "log_e_pass": min(log_e_pass(d, margin, weighting) for weighting in weightings),
        "log_e_block": min(log_e_block(d, margin, weighting) for weighting in weightings),
        **(_limits(stratum, data, levels) if levels.limits else _NO_LIMITS),
    }
    status, reason = _status(stratum.name, numbers, out_below, gate, least_items, least_clusters, levels)
    left = None
    if status == "not_evaluable":
        left = _log_e_left_out(data, gate, stratum.suite)
        reason += f", e-value {show_e(left)} that nothing is lost there"
    return StratumResult(
        suite=stratum.suite,
        name=stratum.name,
        keys=dict(stratum.keys),
        status=status,
        reason=reason,
        log_e_left_out=left,
        **numbers,
    )


_NO_LIMITS: dict[str, Any] = {
    "exact_interval": (_UNKNOWN, _UNKNOWN), "policy_interval": (_UNKNOWN, _UNKNOWN), "lower": _UNKNOWN,
    "upper": _UNKNOWN, "tango": None, "correlation": None,
}  # fmt: skip


def _limits(stratum: Stratum, data: Clustered, levels: Levels) -> dict[str, Any]:
    """What tables show and no rule reads."""
    d = data.differences
    lows = [confidence_bounds(d, levels.enable, weighting)[0] for weighting in data.weightings]
    highs = [confidence_bounds(d, levels.block, weighting)[1] for weighting in data.weightings]
    difference = stratum.data.policy[stratum.items] - stratum.data.exact[stratum.items]
    return {
        "exact_interval": _interval(data.exact, data.sizes),
        "policy_interval": _interval(data.policy, data.sizes),
        "lower": min(lows),
        "upper": max(highs),
        "tango": _tango(stratum, len(d)),
        "correlation": intra_cluster_correlation(difference, stratum.data.layout.clusters[stratum.items]),
    }


def _competence(data: Clustered, gate: Gate, sequential: bool) -> tuple[float, float]:
    """Lower limit of the exact run's mean score, and the limit that puts the stratum out of scope if under the floor.

    With a number of items fixed beforehand the lower limit does both. It is not valid for somebody who looks again and
    again: sooner or later some look shows an incompetent run as competent. And at an early look few items are under
    every floor, which would end the run and drop slices that more items would have kept in. So a run that stops when
    decided has anytime-valid limits, each wrong with at most 1 - ``floor_confidence``: competent by the lower one, out
    of scope by the upper one, open between them.
    """
    if not sequential:
        low = cluster_interval(data.exact, data.sizes, 2.0 * gate.floor_confidence - 1.0).lower
        return low, low
    scores = 2.0 * np.clip(data.exact / data.sizes, 0.0, 1.0) - 1.0  # on [-1, 1], where the bets can be largest
    bounds = [confidence_bounds(scores, 1.0 - gate.floor_confidence, weighting) for weighting in data.weightings]
    return (min(low for low, _ in bounds) + 1.0) / 2.0, (max(high for _, high in bounds) + 1.0) / 2.0


def _log_e_left_out(data: Clustered, gate: Gate, suite: str) -> float:
    """Log e-value against "what is left out is worse than what is judged".

    A judged slice at the floor may lose m_slice, which is the share m_slice / floor of what the exact run gets right
    there. A slice that is left out is worse if it loses more than that share of the exact run's score, and more than
    m_suite, which is accepted anywhere. Each half has an e-value, and their mean is one against both together.
    """
    exact, policy = data.exact / data.sizes, data.policy / data.sizes
    kept = 1.0 - gate.m_slice_of(suite) / gate.floor_of(suite)
    surplus = np.maximum(policy - kept * exact, -kept)
    margin = gate.m_suite_of(suite)
    return min(
        mean_of_e(
            [log_e_positive(surplus, kept, weighting), log_e_pass(data.differences, margin, weighting)], [0.5, 0.5]
        )
        for weighting in data.weightings
    )


def _status(
    name: str,
    n: Mapping[str, Any],
    out_below: float,
    gate: Gate,
    least_items: int,
    least_clusters: int,
    levels: Levels,
) -> tuple[StratumStatus, str]:
    size = f"{n['items']} items in {n['clusters']} clusters"
    loss = f"difference {n['difference']:+.3f} [{n['lower']:+.3f}, {n['upper']:+.3f}], margin {n['margin']:.3f}, {size}"
    values = f"e-values {show_e(n['log_e_pass'])} for passing, {show_e(n['log_e_block'])} for a loss beyond the margin"
    if n["items"] < least_items or n["clusters"] < least_clusters:
        least = (f"{least_items} items in " if least_items > 1 else "") + f"{least_clusters} clusters"
        return "inconclusive", f"{name}: {loss}, {values}; at least {least} are needed to pass"
    if n["exact_low"] < n["floor"]:
        scores = f"{name}: the exact run scores {n['exact']:.3f} on {size}"
        if out_below >= n["floor"]:
            limits = f"limits [{n['exact_low']:.3f}, {out_below:.3f}] for any number of looks"
            return "inconclusive", f"{scores}, {limits} leave the floor of {n['floor']:.2f} open"
        which = "lower" if out_below == n["exact_low"] else "upper"
        return "not_evaluable", (
            f"{scores}, {which} limit {out_below:.3f} at {gate.floor_confidence:.0%}, under the floor of "
            f"{n['floor']:.2f}; the policy {n['policy']:.3f}"
        )
    if n["log_e_pass"] >= levels.wanted:
        return "non_inferior", f"{name}: {loss}, {values}"
    return "inconclusive", f"{name}: {loss}, {values}; {math.exp(levels.wanted):.0f} is needed"


def show_e(log_e: float) -> str:
    """An e-value for readers."""
    return f"{math.exp(log_e):.3g}" if log_e < 600.0 else f"10^{log_e / math.log(10.0):.0f}"


def _interval(sums: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float]:
    interval = cluster_interval(sums, sizes, TABLE_CONFIDENCE)
    return interval.lower, interval.upper


def _tango(stratum: Stratum, clusters: int) -> tuple[float, float] | None:
    exact, policy = stratum.data.exact[stratum.items], stratum.data.policy[stratum.items]
    binary = all(bool(np.all((side == 0.0) | (side == 1.0))) for side in (exact, policy))
    if not binary or clusters != exact.size:
        return None
    gained, lost = int((policy > exact).sum()), int((policy < exact).sum())
    interval = tango_interval(gained, lost, exact.size, TABLE_CONFIDENCE)
    return interval.lower, interval.upper
