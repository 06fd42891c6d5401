"""The leaderboard: verdicts, scores, memory and provenance of one run as plain data. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.repetition import repeat_identical, unsteady
from kvgate.evals.judge.types import RowVerdict
from kvgate.evals.judge.verdict import PAGE_SIZE, decide
from kvgate.evals.leaderboard.drift import drifts
from kvgate.evals.leaderboard.examples import disagreements
from kvgate.evals.leaderboard.fidelity import fidelity_of
from kvgate.evals.leaderboard.slices import grid, mark_pareto, quality, survival
from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.stats.intervals import cluster_interval

MIB = float(1 << 20)


def build_leaderboard(
    manifest: Mapping[str, Any],
    records: Sequence[CellRecord],
    gate: Gate,
    checks: Mapping[str, Any],
    oracles: Mapping[str, str],
) -> dict[str, Any]:
    """Everything a reader, a plot or a rollout tool needs; the same inputs give the same bytes."""
    declared = {**unsteady(checks), **oracles}
    plan = manifest["plan"]
    watched = bool(plan.get("until_decided"))
    verdicts = decide(records, gate, repeat_identical=repeat_identical(checks), declared=declared, sequential=watched,
        named=plan.get("primary"), page_size=plan.get("page_size", PAGE_SIZE))  # fmt: skip
    cells: dict[tuple[str, str], list[CellRecord]] = {}
    for record in records:
        cells.setdefault((record.label, record.protocol), []).append(record)
    exact = {(record.protocol, record.item_hash): record for record in records if record.exact}
    rows = [_row(verdict, cells[verdict.label, verdict.protocol], gate, exact) for verdict in verdicts]
    mark_pareto(rows)
    board = {
        "schema_version": SCHEMA_VERSION,
        "name": manifest["plan"]["name"],
        "plan": manifest["plan"],
        "config_hash": manifest["config_hash"],
        "samples_hash": samples_hash(records),
        "provenance": manifest["provenance"],
        "gate": {**asdict(gate), "content_hash": gate.content_hash, "shipped": gate.shipped},
        "tried": tried(verdicts, gate, plan.get("primary")),
        "checks": dict(checks),
        "exact": competence(records),
        "grids": {
            protocol: grid((record for record in exact.values() if record.protocol == protocol), gate)
            for protocol in sorted({protocol for protocol, _ in exact})
        },
        "rows": rows,
    }
    plain: dict[str, Any] = _plain(board)
    return plain


def tried(verdicts: Sequence[RowVerdict], gate: Gate, named: str | None) -> dict[str, Any]:
    """Out of how many rows an enabled one was found, and what part of the gate's alpha each family has for that."""
    return {
        "rows": len(verdicts),
        "families": len({verdict.family for verdict in verdicts}),
        "named": named,
        "alpha": gate.alpha,
        "alpha_of_a_family": min((verdict.alpha_enable for verdict in verdicts if verdict.alpha_enable), default=None),
    }


def samples_hash(records: Iterable[CellRecord]) -> str:
    """BLAKE2b-128 over the lines of ``samples.jsonl``."""
    total = hashlib.blake2b(digest_size=16)
    for record in records:
        total.update(record.to_json().encode() + b"\n")
    return total.hexdigest()


def competence(records: Iterable[CellRecord]) -> list[dict[str, Any]]:
    """The exact run by suite, task and length: what the suites can see at all."""
    groups: dict[tuple[str, str, int], list[CellRecord]] = {}
    for record in records:
        if record.exact:
            groups.setdefault((record.suite, record.task, record.length), []).append(record)
    return [_competence(key, found) for key, found in sorted(groups.items())]


def _competence(key: tuple[str, str, int], found: Sequence[CellRecord]) -> dict[str, Any]:
    suite, task, length = key
    clusters: dict[str, list[float]] = {}
    for record in found:
        clusters.setdefault(record.cluster, []).append(record.score)
    interval = cluster_interval([sum(s) for s in clusters.values()], [len(s) for s in clusters.values()], 0.95)
    return {
        "suite": suite,
        "task": task,
        "length": length,
        "items": len(found),
        "clusters": len(clusters),
        "score": sum(record.score for record in found) / len(found),
        "interval": [interval.lower, interval.upper],
    }


def _row(
    verdict: RowVerdict, cells: Sequence[CellRecord], gate: Gate, exact: Mapping[tuple[str, str], CellRecord]
) -> dict[str, Any]:
    row = verdict.to_dict()
    row["params"] = {key: value for key, value in cells[0].params.items() if len({c.params[key] for c in cells}) == 1}
    row["exact_score"] = _mean(stratum.exact for stratum in verdict.suites)
    row["policy_score"] = _mean(stratum.policy for stratum in verdict.suites)
    row["memory"] = {
        "resident_mib": _mean(cell.resident_bytes / MIB for cell in cells),
        "logical_mib": _mean(cell.logical_bytes / MIB for cell in cells),
        "exact_resident_mib": _mean(cell.exact_resident_bytes / MIB for cell in cells),
        "claimed_share": _mean((cell.budget or 0) / max(cell.context_tokens, cell.budget or 1) for cell in cells),
        "resident_share": _mean(cell.resident_bytes / cell.exact_resident_bytes for cell in cells),
    }
    row["evicted_tokens"] = _mean(cell.evicted_tokens for cell in cells)
    row["quality"] = quality(cells)
    paired = {item: record for (protocol, item), record in exact.items() if protocol == verdict.protocol}
    row["exact_quality"] = quality(paired.values())
    row["grid"] = grid(cells, gate)
    sound = cells if verdict.status != "invalid" else ()  # an invalid row may have no partner for its answers
    row["survival"] = survival(sound, paired)
    row["drift"] = [asdict(found) for found in drifts(sound, paired)]
    row["examples"] = disagreements(sound, paired)
    row["fidelity"] = fidelity_of(cells)
    return row


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _plain(value: Any) -> Any:
    """JSON has no infinities: an e-value nobody computed is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
