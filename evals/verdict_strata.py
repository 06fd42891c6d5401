"""Rules 2 to 4 on one suite or slice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.gates import Gate, SliceKey
from kvgate.evals.statistics import confidence_bounds, log_e_block, log_e_pass
from kvgate.evals.statistics_fixed import cluster_interval, tango_interval
from kvgate.evals.verdict_pairs import Pair
from kvgate.evals.verdict_types import StratumResult, StratumStatus

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
    def weights(self) -> NDArray[np.float64] | None:
        """Cluster sizes, or None where they are equal and weigh nothing."""
        return None if np.all(self.sizes == self.sizes[0]) else self.sizes


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


def judge(stratum: Stratum, gate: Gate, margin: float, least_items: int, least_clusters: int) -> StratumResult:
    """Numbers and status of a stratum with at least one pair.

    Every e-value is the smaller of the two weightings, so a claim holds for the mean over clusters and over items.
    """
    data = clustered(stratum.pairs)
    d, weights = data.differences, data.weights
    weightings = [None] if weights is None else [None, weights]
    bounds = [confidence_bounds(d, gate.alpha, weighting) for weighting in weightings]
    floor = gate.floor_of(stratum.suite)
    numbers: dict[str, Any] = {
        "items": len(stratum.pairs),
        "clusters": len(d),
        "exact": float(np.mean(data.exact / data.sizes)),
        "policy": float(np.mean(data.policy / data.sizes)),
        "difference": float(np.mean(d)),
        "difference_items": float((data.policy - data.exact).sum() / data.sizes.sum()),
        "exact_low": cluster_interval(data.exact, data.sizes, 2.0 * gate.floor_confidence - 1.0).lower,
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
    status, reason = _status(stratum.name, numbers, gate, least_items, least_clusters)
    return StratumResult(
        suite=stratum.suite, name=stratum.name, keys=dict(stratum.keys), status=status, reason=reason, **numbers
    )


def _status(
    name: str, n: Mapping[str, Any], gate: Gate, least_items: int, least_clusters: int
) -> tuple[StratumStatus, str]:
    size = f"{n['items']} items in {n['clusters']} clusters"
    loss = f"difference {n['difference']:+.3f} [{n['lower']:+.3f}, {n['upper']:+.3f}], margin {n['margin']:.3f}, {size}"
    values = f"e-values {show_e(n['log_e_pass'])} for passing, {show_e(n['log_e_block'])} for a loss beyond the margin"
    if n["items"] < least_items or n["clusters"] < least_clusters:
        least = (f"{least_items} items in " if least_items > 1 else "") + f"{least_clusters} clusters"
        return "inconclusive", f"{name}: {loss}, {values}; at least {least} are needed to pass"
    if n["exact_low"] < n["floor"]:
        return "not_evaluable", (
            f"{name}: the exact run scores {n['exact']:.3f} on {size}, lower limit {n['exact_low']:.3f} at "
            f"{gate.floor_confidence:.0%}, under the floor of {n['floor']:.2f}"
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
