"""Which whole sequences give way when pages run out. Pure: arrays in, victims with a reason out.

Each factor is scaled to [0, 1] over the requests in question and weighted (config.PreemptionConfig); the highest score
goes first. Ties: the later arrival goes first, so a total order exists and the oldest request always gets through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.config import PreemptionConfig

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """Running requests that may be victims, as parallel arrays of one length.

    Attributes:
        slot: their slots. rank: priority level (higher is less urgent). seq: order of arrival.
        reclaimable: blocks that would come free at once (held by nobody else, not fenced).
        recovery: seconds until it could go on, the cheaper of swap and recompute; recompute: seconds if recomputed.
        generated, expected: output so far and expected in total.
        waited: rounds waited in total. slack: clock time to the deadline, inf without one.
        preemptions: times it was a victim already.
    """

    slot: NDArray[np.int64]
    rank: NDArray[np.int32]
    seq: NDArray[np.int64]
    reclaimable: NDArray[np.int64]
    recovery: Floats
    recompute: Floats
    generated: NDArray[np.int64]
    expected: NDArray[np.int64]
    waited: NDArray[np.int64]
    slack: Floats
    preemptions: NDArray[np.int32]


@dataclass(frozen=True)
class Victim:
    """A request that gives way, with its score and why it was chosen."""

    slot: int
    score: float
    reclaimable: int
    why: str


def _scaled(values: NDArray[np.int64] | NDArray[np.int32] | Floats) -> Floats:
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return np.zeros(len(values))
    return np.asarray((values - low) / (high - low), np.float64)


def factors(candidates: Candidates, horizon: float) -> dict[str, Floats]:
    """Each factor in [0, 1] per candidate; the sign says whether it speaks for (+) or against (-) being a victim.

    ``horizon`` is the slack from which a deadline no longer matters, in clock time.
    """
    return {
        "priority": _scaled(candidates.rank),
        "reclaimable": _scaled(candidates.reclaimable),
        "recompute": -candidates.recovery / max(float(candidates.recompute.max()), 1e-9),
        "progress": -np.minimum(1.0, candidates.generated / np.maximum(1, candidates.expected)),
        "waiting": -_scaled(candidates.waited),
        "deadline": -np.clip(1.0 - candidates.slack / max(horizon, 1e-9), 0.0, 1.0),
    }


def choose(candidates: Candidates, need: int, weights: PreemptionConfig, horizon: float = 1.0) -> tuple[Victim, ...]:
    """Victims that free at least ``need`` blocks, or none at all if all of them together would not.

    Requests preempted ``max_preemptions`` times are only taken where the others do not suffice. Requests that would
    free nothing now (shared or fenced pages only) are never taken.
    """
    if need <= 0 or len(candidates.slot) == 0:
        return ()
    parts = factors(candidates, horizon)
    score = np.zeros(len(candidates.slot))
    for name, value in parts.items():
        score += getattr(weights, name) * value
    spent = candidates.preemptions >= weights.max_preemptions
    order = np.lexsort((-candidates.seq, -score, spent))
    order = order[candidates.reclaimable[order] > 0]
    freed = np.cumsum(candidates.reclaimable[order])
    enough = int(np.searchsorted(freed, need))
    if enough >= len(order):
        return ()
    return tuple(_victim(candidates, int(at), float(score[at]), parts, weights) for at in order[: enough + 1])


def _victim(
    candidates: Candidates, at: int, score: float, parts: dict[str, Floats], weights: PreemptionConfig
) -> Victim:
    shares = ", ".join(f"{name} {getattr(weights, name) * value[at]:+.2f}" for name, value in parts.items())
    past = candidates.preemptions[at] >= weights.max_preemptions
    spent = ", past max_preemptions: nobody else suffices" if past else ""
    blocks = int(candidates.reclaimable[at])
    why = f"score {score:.2f} ({shares}); frees {blocks} blocks{spent}"
    return Victim(int(candidates.slot[at]), score, blocks, why)
