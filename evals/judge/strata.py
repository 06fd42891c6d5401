"""Rules 2 to 4 on one suite or slice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.judge.gates import Gate, SliceKey
from kvgate.evals.judge.pairs import Pair
from kvgate.evals.judge.types import StratumResult, StratumStatus
from kvgate.evals.stats.betting import confidence_bounds, log_e_block, log_e_pass
from kvgate.evals.stats.intervals import cluster_interval, tango_interval

TABLE_CONFIDENCE = 0.90  # two-sided: 95 % on each side, like the anytime-valid limits beside it


@dataclass(frozen=True)
class Stratum:
    """Pairs judged together; ``keys`` is empty for a suite."""

    suite: str
    keys: Mapping[str, Any]
    pairs: tuple[Pair, ...]

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


def slices_of(suite: str, pairs: Iterable[Pair], keys: Sequence[SliceKey], gate: Gate) -> list[Stratum]:
    """Groups of a suite's pairs by ``keys``, in order; none for no keys."""
    if not keys:
        return []
    groups: dict[tuple[Any, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        values = {"task": pair.policy.task, "length": pair.policy.length, "depth": gate.depth_bin(pair.policy.depth)}
        groups[tuple(values[key] for key in keys)].append(pair)
    order = sorted(groups, key=lambda group: tuple((value is not None, value) for value in group))
    return [Stratum(suite, dict(zip(keys, group, strict=True)), tuple(groups[group])) for group in order]


def clustered(pairs: Iterable[Pair]) -> Clustered:
    """Sums over clusters."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for pair in pairs:
        for index, value in enumerate((1.0, pair.exact.score, pair.policy.score)):
            sums[pair.cluster][index] += value
    table = np.array([sums[name] for name in sorted(sums)], dtype=np.float64).reshape(-1, 3)
    return Clustered(table[:, 0], table[:, 1], table[:, 2])


def judge(
    stratum: Stratum, gate: Gate, margin: float, least_items: int, least_clusters: int, *, sequential: bool
) -> StratumResult:
    """Numbers and status of a stratum with at least one pair.

    Every e-value is the smaller of the two weightings, so a claim holds for the mean over clusters and over items.
    """
    data = clustered(stratum.pairs)
    d, weightings = data.differences, data.weightings
    bounds = [confidence_bounds(d, gate.alpha, weighting) for weighting in weightings]
    exact_low, out_below = _competence(data, gate, sequential)
    floor = gate.floor_of(stratum.suite)
    numbers: dict[str, Any] = {
        "items": len(stratum.pairs),
        "clusters": len(d),
        "exact": float(np.mean(data.exact / data.sizes)),
        "policy": float(np.mean(data.policy / data.sizes)),
        "difference": float(np.mean(d)),
        "difference_items": float((data.policy - data.exact).sum() / data.sizes.sum()),
        "exact_low": exact_low,
        "exact_interval": _limits(data.exact, data.sizes),
        "policy_interval": _limits(data.policy, data.sizes),
        "lower": min(low for low, _ in bounds),
        "upper": max(high for _, high in bounds),
        "tango": _tango(stratum.pairs, len(d)),
        "margin": margin,
        "floor": floor,
        "log_e_pass": min(log_e_pass(d, margin, weighting) for weighting in weightings),
        "log_e_block": min(log_e_block(d, margin, weighting) for weighting in weightings),
    }
    status, reason = _status(stratum.name, numbers, out_below, gate, least_items, least_clusters)
    return StratumResult(
        suite=stratum.suite, name=stratum.name, keys=dict(stratum.keys), status=status, reason=reason, **numbers
    )


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


def _status(
    name: str, n: Mapping[str, Any], out_below: float, gate: Gate, least_items: int, least_clusters: int
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
            f"{n['floor']:.2f}"
        )
    wanted = 1.0 / gate.alpha
    if n["log_e_pass"] >= math.log(wanted):
        return "non_inferior", f"{name}: {loss}, {values}"
    return "inconclusive", f"{name}: {loss}, {values}; {wanted:.0f} is needed"


def show_e(log_e: float) -> str:
    """An e-value for readers."""
    return f"{math.exp(log_e):.3g}" if log_e < 600.0 else f"10^{log_e / math.log(10.0):.0f}"


def _limits(sums: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float]:
    interval = cluster_interval(sums, sizes, TABLE_CONFIDENCE)
    return interval.lower, interval.upper


def _tango(pairs: Sequence[Pair], clusters: int) -> tuple[float, float] | None:
    binary = all(score in (0.0, 1.0) for pair in pairs for score in (pair.exact.score, pair.policy.score))
    if not binary or clusters != len(pairs):
        return None
    gained = sum(pair.difference > 0.0 for pair in pairs)
    lost = sum(pair.difference < 0.0 for pair in pairs)
    interval = tango_interval(gained, lost, len(pairs), TABLE_CONFIDENCE)
    return interval.lower, interval.upper
