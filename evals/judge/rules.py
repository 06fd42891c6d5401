"""Rules 2, 3, 4 and 6 of ``verdict`` on the suites of one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvgate.evals.judge.gates import Gate, SliceKey
from kvgate.evals.judge.pairs import Pair
from kvgate.evals.judge.strata import Stratum, clustered, judge, show_e, slices_of
from kvgate.evals.judge.types import Lengths, Status, StratumResult
from kvgate.evals.stats.betting import mean_of_e

_ALARM_GROUPS: tuple[tuple[SliceKey, ...], ...] = (("length", "depth"), ("task",))


@dataclass(frozen=True)
class JudgedSuite:
    """A suite of a row with its slices; ``kept`` are the pairs of the slices that are in scope."""

    suite: StratumResult
    slices: tuple[StratumResult, ...]
    kept: tuple[Pair, ...]
    pairs: tuple[Pair, ...]
    alarms: tuple[str, ...]
    lengths: Lengths


def judge_suite(suite: str, pairs: Sequence[Pair], gate: Gate, *, sequential: bool) -> JudgedSuite:
    """Slices first, then the suite on what is left of them."""
    strata = slices_of(suite, pairs, gate.slice_by, gate)
    slices = tuple(
        judge(stratum, gate, gate.m_slice_of(suite), 1, gate.min_slice_clusters, sequential=sequential)
        for stratum in strata
    )
    out = [entry for entry in slices if entry.status == "not_evaluable"]
    kept = tuple(
        pair
        for stratum, entry in zip(strata, slices, strict=True)
        if entry.status != "not_evaluable"
        for pair in stratum.pairs
    )
    judged = kept if strata and kept else tuple(pairs)
    whole = Stratum(suite, {}, judged)
    result = judge(whole, gate, gate.m_suite_of(suite), gate.min_items, gate.min_clusters, sequential=sequential)
    if out and len(out) > gate.max_excluded * len(slices):
        reason = (
            f"{suite}: the exact run is not competent on {len(out)} of {len(slices)} slices, such as {out[0].reason}"
        )
        result = replace(result, status="not_evaluable", reason=reason)
    return JudgedSuite(
        suite=result,
        slices=slices,
        kept=kept if strata else judged,
        pairs=tuple(pairs),
        alarms=tuple(_alarms(suite, judged, gate)),
        lengths=_lengths(suite, judged, gate),
    )


def share_alpha(judged: Sequence[JudgedSuite], gate: Gate) -> list[JudgedSuite]:
    """Mark the strata whose loss is proved by their own share of alpha; each such mark alone blocks the row."""
    wanted = math.log(1.0 / gate.alpha)
    weights = {entry.name: weight for entry, weight in _weighted(judged)}

    def mark(entry: StratumResult) -> StratumResult:
        if entry.status == "not_evaluable" or entry.log_e_block + math.log(weights[entry.name]) < wanted:
            return entry
        return replace(entry, status="inferior")

    return [replace(part, suite=mark(part.suite), slices=tuple(map(mark, part.slices))) for part in judged]


def row_evidence(judged: Sequence[JudgedSuite]) -> float:
    """Log of the weighted mean of the e-values for a loss beyond the margin, over suites and slices."""
    entries = list(_weighted(judged))
    values = [-math.inf if entry.status == "not_evaluable" else entry.log_e_block for entry, _ in entries]
    return mean_of_e(values, [weight for _, weight in entries])


def _weighted(judged: Sequence[JudgedSuite]) -> Iterator[tuple[StratumResult, float]]:
    """Every stratum with its share: half to suites and half to slices, each half in equal parts."""
    slices = [entry for part in judged for entry in part.slices]
    for part in judged:
        yield part.suite, (0.5 if slices else 1.0) / len(judged)
    for entry in slices:
        yield entry, 0.5 / len(slices)


def row_status(judged: Sequence[JudgedSuite], gate: Gate) -> tuple[Status, list[str]]:
    """Status of a valid row and the sentences that explain it."""
    suites = [part.suite for part in judged]
    strata = suites + [entry for part in judged for entry in part.slices]
    log_e_row = row_evidence(judged)
    if log_e_row >= math.log(1.0 / gate.alpha):
        return "block", _losses(strata, log_e_row)
    lacking = [entry.reason for entry in suites if entry.status == "not_evaluable"]
    if lacking or not judged:
        return "not_evaluable", lacking
    reasons = [entry.reason for entry in strata if entry.status == "inconclusive"]
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
    candidates = proved or [entry for entry in strata if entry.status != "not_evaluable"]
    order = sorted(candidates, key=lambda entry: -entry.log_e_block)
    return [
        pooled,
        *(f"{'proved in' if proved else 'strongest in'} {entry.reason}" for entry in order[: len(proved) or 1]),
    ]


def _alarms(suite: str, pairs: Sequence[Pair], gate: Gate) -> Iterator[str]:
    """Groups too small to prove anything that collapsed all the same."""
    for keys in _ALARM_GROUPS:
        for stratum in slices_of(suite, pairs, keys, gate):
            differences = clustered(stratum.pairs).differences
            loss = -float(differences.mean())
            if len(differences) >= gate.alarm_clusters and loss >= gate.slice_alarm:
                count = len(stratum.pairs)
                yield f"{stratum.name}: lost {loss:.3f} of its score on {count} items, alarm at {gate.slice_alarm:.2f}"


def _lengths(suite: str, pairs: Sequence[Pair], gate: Gate) -> Lengths:
    exact = sum(pair.exact.output_tokens for pair in pairs)
    policy = sum(pair.policy.output_tokens for pair in pairs)
    ratio = policy / exact if exact else None
    within = policy == 0 if ratio is None else abs(ratio - 1.0) <= gate.length_drift
    return Lengths(suite, exact / len(pairs), policy / len(pairs), ratio, within)


def _drift(lengths: Lengths, gate: Gate) -> str:
    ratio = "undefined" if lengths.ratio is None else f"{lengths.ratio:.2f}"
    return (
        f"{lengths.suite}: answers of {lengths.policy:.1f} tokens against the exact run's {lengths.exact:.1f}, "
        f"ratio {ratio}, allowed {1.0 - gate.length_drift:.2f} to {1.0 + gate.length_drift:.2f}"
    )
