"""The verdict on an endpoint beside another: the rules of a run on suites, tasks, lengths and depths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgate.evals.compare.endpoints.noise import Noise
from kvgate.evals.judge.columns import Pair, columns_of
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.rules import judge_row
from kvgate.evals.judge.types import Levels, Status, StratumResult


@dataclass(frozen=True)
class EndpointVerdict:
    """The verdict on one candidate.

    Attributes:
        status: ``enable``, ``block``, ``inconclusive`` or ``not_evaluable``; ``reasons``: sentences with numbers.
        gate, gate_hash: by what it was judged; ``shipped``: whether kvgate ships a gate of this name and content.
        items, clusters: pairs, and groups of them that count as one observation.
    """

    status: Status
    reasons: tuple[str, ...]
    gate: str
    gate_hash: str
    shipped: bool
    suites: tuple[StratumResult, ...]
    slices: tuple[StratumResult, ...]
    items: int
    clusters: int


def judge_endpoints(pairs: Sequence[Pair], gate: Gate, noise: Noise) -> EndpointVerdict:
    """Judge by the gate; inconclusive where the exact endpoint differs from itself by more than the margin."""
    status, found, judged = judge_row(columns_of(pairs), gate, Levels(gate.alpha, gate.alpha))
    reasons = tuple(found)
    if noise.too_loud(gate.m_suite) and status in ("enable", "block"):
        status = "inconclusive"
        loud = (
            f"the exact endpoint disagrees with itself: scores change by {noise.score_change:.3f} on {noise.items} "
            f"items asked twice, the margin is {gate.m_suite}"
        )
        reasons = (loud, *reasons)
    return EndpointVerdict(
        status=status,
        reasons=reasons,
        gate=gate.name,
        gate_hash=gate.content_hash,
        shipped=gate.shipped,
        suites=tuple(part.suite for part in judged),
        slices=tuple(entry for part in judged for entry in part.slices),
        items=len(pairs),
        clusters=sum(len(set(part.data.layout.clusters.tolist())) for part in judged),
    )
