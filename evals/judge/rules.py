"""Rules 2, 3, 4 and 6 of ``verdict`` on the suites of one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvgate.evals.judge.columns import Columns, Indices
from kvgate.evals.judge.gates import Gate, Grouping
from kvgate.evals.judge.strata import Stratum, clustered, judge, show_e
from kvgate.evals.judge.types import Lengths, Levels, Status, StratumResult
from kvgate.evals.stats.betting import mean_of_e

_ALARM_GROUPS: tuple[Grouping, ...] = (("length", "depth"), ("task",))


@dataclass(frozen=True)
class JudgedSuite:
    """A suite of a row with its slices; ``kept`` are the items of the slices that are in scope."""

    suite: StratumResult
    slices: tuple[StratumResult, ...]
    data: Columns
    kept: Indices
    alarms: tuple[str, ...]
    lengths: Lengths


def judge_suite(data: Columns, gate: Gate, levels: Levels) -> JudgedSuite:
    """Slices first, then the suite on what is left of them."""
    slices, kept, crowded = _judge_slices(data, gate, levels)
    judged = kept if kept.size else data.everything
    whole = Stratum(data, {}, judged)
    result = judge(whole, gate, gate.m_suite_of(data.suite), gate.min_items, gate.min_clusters, levels)
    if crowded is not None:
        result = replace(result, status="not_evaluable", reason=f"{data.suite}: {crowded}")
    return JudgedSuite(
        suite=result,
        slices=slices,
        data=data,
        kept=kept,
        alarms=tuple(_alarms(data, judged, gate)),
        lengths=_lengths(data, judged, gate),
    )


def _judge_slices(data: Columns, gate: Gate, levels: Levels) -> tuple[tuple[StratumResult, ...], Indices, str | None]:
    """Slices, the items that stay in scope, and why too few of them do.

    Where a gate has several groupings, what one of them leaves out is no part of the slices of the next: items that
    nobody solves would dilute them.
    """
    kept, found, crowded = data.everything, list[StratumResult](), None
    names = set[str]()
    for keys in gate.groupings:
        strata = [stratum for stratum in _strata(data, keys, kept) if stratum.name not in names]
        names |= {stratum.name for stratum in strata}
        results = [
            judge(stratum, gate, gate.m_slice_of(data.suite), 1, gate.min_slice_clusters, levels) for stratum in strata
        ]
        gone = [
            (stratum, entry)
            for stratum, entry in zip(strata, results, strict=True)
            if entry.status == "not_evaluable"
        ]  # fmt: skip
        for stratum, _ in gone:
            kept = np.setdiff1d(kept, stratum.items, assume_unique=True)
        found += results
        if gone and len(gone) > gate.max_excluded * len(results):
            crowded = (
                f"the exact run is not competent on {len(gone)} of {len(results)} slices, such as {gone[0][1].reason}"
            )
    return tuple(found), kept, crowded


def _strata(data: Columns, keys: Grouping, kept: Indices) -> list[Stratum]:
    """Slices by ``keys`` of the items that are still in scope; a suite that has none of the keys has no slices."""
    groups = data.layout.groups(keys)
    if all(value is None for values, _ in groups for value in values.values()):
        return []
    if kept.size < data.layout.items:
        groups = [(values, np.intersect1d(items, kept, assume_unique=True)) for values, items in groups]
    return [Stratum(data, values, items) for values, items in groups if items.size]


def share_alpha(judged: Sequence[JudgedSuite], levels: Levels) -> list[JudgedSuite]:
    """Mark the strata whose loss is proved by their own share of alpha; each such mark alone blocks the row.

    Strata in which the exact run is not competent are no exception: a loss that is proved there is a loss.
    """
    wanted = math.log(1.0 / levels.block)
    weights = {entry.name: weight for entry, weight in _weighted(judged)}

    def mark(entry: StratumResult) -> StratumResult:
        proved = entry.log_e_block + math.log(weights[entry.name]) >= wanted
        return replace(entry, status="inferior") if proved else entry

    return [replace(part, suite=mark(part.suite), slices=tuple(map(mark, part.slices))) for part in judged]


def row_evidence(judged: Sequence[JudgedSuite]) -> float:
    """Log of the weighted mean of the e-values for a loss beyond the margin, over suites and slices."""
    entries = list(_weighted(judged))
    return mean_of_e([entry.log_e_block for entry, _ in entries], [weight for _, weight in entries])


def _weighted(judged: Sequence[JudgedSuite]) -> Iterator[tuple[StratumResult, float]]:
    """Every stratum with its share: half to suites and half to slices, each half in equal parts."""
    slices = [entry for part in judged for entry in part.slices]
    for part in judged:
        yield part.suite, (0.5 if slices else 1.0) / len(judged)
    for entry in slices:
        yield entry, 0.5 / len(slices)


def judge_row(suites: Sequence[Columns], gate: Gate, levels: Levels) -> tuple[Status, list[str], list[JudgedSuite]]:
    """Status of a row whose records can be trusted, the sentences that explain it, and the numbers behind them."""
    judged = share_alpha([judge_suite(data, gate, levels) for data in suites], levels)
    status, reasons = _row_status(judged, gate, levels)
    return status, reasons, judged


def _row_status(judged: Sequence[JudgedSuite], gate: Gate, levels: Levels) -> tuple[Status, list[str]]:
    suites = [part.suite for part in judged]
    strata = suites + [entry for part in judged for entry in part.slices]
    log_e_row = row_evidence(judged)
    if log_e_row >= math.log(1.0 / levels.block):
        return "block", _losses(strata, log_e_row)
    lacking = [entry.reason for entry in suites if entry.status == "not_evaluable"]
    if lacking or not judged:
        return "not_evaluable", lacking
    reasons = [entry.reason for entry in strata if entry.status == "inconclusive"]
    reasons += [
        f"left out, and not shown to be no worse than what was judged ({math.exp(levels.wanted):.0f} is needed): "
        f"{entry.reason}"
        for entry in strata
        if entry.log_e_left_out is not None and entry.log_e_left_out < levels.wanted
    ]
    reasons += [alarm for part in judged for alarm in part.alarms]
    reasons += [_drift(part.lengths, gate) for part in judged if not part.lengths.within]
    if reasons:
        return "inconclusive", reasons
    return "enable", [entry.reason for entry in suites]


def _losses(strata: Sequence[StratumResult], log_e_row: float) -> list[str]:
    pooled = (
        f"a loss beyond the margin is proved: pooled e-value {show_e(log_e_row)} over {len(strata)} suites and slices"
    )
    proved = [entry for entry in strata if entry.status == "inferior"]
    order = sorted(proved or strata, key=lambda entry: -entry.log_e_block)
    return [
        pooled,
        *(f"{'proved in' if proved else 'strongest in'} {entry.reason}" for entry in order[: len(proved) or 1]),
    ]


def _alarms(data: Columns, kept: Indices, gate: Gate) -> Iterator[str]:
    """Groups too small to prove anything that collapsed all the same."""
    for keys in _ALARM_GROUPS:
        for stratum in _strata(data, keys, kept):
            differences = clustered(stratum).differences
            loss = -float(differences.mean())
            if len(differences) >= gate.alarm_clusters and loss >= gate.slice_alarm:
                count = stratum.items.size
                yield f"{stratum.name}: lost {loss:.3f} of its score on {count} items, alarm at {gate.slice_alarm:.2f}"


def _lengths(data: Columns, kept: Indices, gate: Gate) -> Lengths:
    exact, policy = float(data.exact_tokens[kept].sum()), float(data.policy_tokens[kept].sum())
    ratio = policy / exact if exact else None
    within = policy == 0 if ratio is None else abs(ratio - 1.0) <= gate.length_drift
    return Lengths(data.suite, exact / kept.size, policy / kept.size, ratio, within)


def _drift(lengths: Lengths, gate: Gate) -> str:
    ratio = "undefined" if lengths.ratio is None else f"{lengths.ratio:.2f}"
    return (
        f"{lengths.suite}: answers of {lengths.policy:.1f} tokens against the exact run's {lengths.exact:.1f}, "
        f"ratio {ratio}, allowed {1.0 - gate.length_drift:.2f} to {1.0 + gate.length_drift:.2f}"
    )
