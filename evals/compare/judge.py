"""Judging pairs that somebody else made: the same gates and rules as a run's, on scores alone. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvgate.evals.judge.columns import Pair, columns_of
from kvgate.evals.judge.gates import Gate, load_gate
from kvgate.evals.judge.rules import judge_row, row_evidence
from kvgate.evals.judge.scope import scope_of
from kvgate.evals.judge.types import Levels, Scope, Status, StratumResult

SUITE = "all tasks"


class ScoredPair(NamedTuple):
    """One item, exact and as the candidate answered it.

    ``cluster``: items of a task that share it (a source document, a conversation) count as one observation; None: the
    item stands for itself. Scores in [0, 1].
    """

    task: str
    item: str | int
    cluster: str | int | None
    score_exact: float
    score_candidate: float


@dataclass(frozen=True)
class Judgement:
    """The verdict on a candidate, from pairs alone.

    Attributes:
        status: "enable" where each task is shown to lose less than its margin, "block" where a loss beyond it is
            proved, "not_evaluable" where the exact side is not competent, else "inconclusive".
        reasons: sentences with numbers. ``overall``: all tasks together; ``tasks``: each by itself.
        scope: what is judged together (``pooled``) and what was left out since the exact side is not competent.
        not_checked: what a run of kvgate's own checks besides, and pairs cannot show.
        gate: its name, content hash and whether it comes with kvgate.
        log_e_block: pooled evidence of a loss beyond a margin; a block needs log(1 / alpha).
    """

    candidate: str
    status: Status
    reasons: tuple[str, ...]
    overall: StratumResult
    tasks: tuple[StratumResult, ...]
    scope: Scope
    items: int
    clusters: int
    gate: Mapping[str, Any]
    log_e_block: float
    not_checked: tuple[str, ...] = (
        "that the exact side repeats itself",
        "answer lengths",
        "what stays in memory",
        "that anything was evicted",
    )

    @property
    def enabled(self) -> bool:
        """Whether the candidate may be switched on, for these tasks."""
        return self.status == "enable"

    @property
    def blocked(self) -> bool:
        """Whether a loss beyond a margin is proved."""
        return self.status == "block"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.candidate}: {self.status} (gate {self.gate['name']}): {' '.join(self.reasons)}"


def judge(
    pairs: Iterable[ScoredPair | tuple[str, str | int, str | int | None, float, float]],
    gate: Gate | str | Path = "production",
    *,
    candidate: str = "candidate",
) -> Judgement:
    """Judge a candidate by ``gate``: a shipped one's name, a YAML file, or a :class:`Gate`.

    Args:
        pairs: (task, item, cluster, score_exact, score_candidate), in any order; every item once. All of them: who
            looks early and goes on has looked more than once.

    Raises:
        ValueError: no pairs, an item twice, a score that is no number in [0, 1].
    """
    chosen = gate if isinstance(gate, Gate) else load_gate(gate)
    checked = _checked(pairs)
    (data,) = columns_of(checked)
    status, reasons, judged = judge_row([data], chosen, Levels(chosen.alpha, chosen.alpha))
    (part,) = judged
    return Judgement(
        candidate=candidate,
        status=status,
        reasons=tuple(reasons),
        overall=part.suite,
        tasks=part.slices,
        scope=scope_of("pairs", set(), judged, chosen),
        items=data.layout.items,
        clusters=len(set(data.layout.clusters)),
        gate={"name": chosen.name, "content_hash": chosen.content_hash, "shipped": chosen.shipped},
        log_e_block=row_evidence(judged),
    )


def _checked(pairs: Iterable[Any]) -> list[Pair]:
    found: dict[tuple[str, str], Pair] = {}
    for place, raw in enumerate(pairs, 1):
        try:
            task, item, cluster, exact, policy = raw
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"pair {place} is {raw!r:.80}; give (task, item, cluster, score_exact, score_candidate)"
            ) from error
        if not isinstance(task, str) or not task:
            raise ValueError(f"pair {place}: task is {task!r:.80}; give its name")
        for side, score in (("exact", exact), ("candidate", policy)):
            number = isinstance(score, int | float) and not isinstance(score, bool)
            if not number or not math.isfinite(score) or not 0.0 <= score <= 1.0:
                raise ValueError(
                    f"pair {place} ({task}, {item}): score_{side} is {score!r:.40}; give a number in [0, 1]"
                )
        key = (task, str(item))
        if key in found:
            raise ValueError(f"pair {place}: item {item!r:.80} of task {task} comes twice; give every item once")
        group = f"{task}/{item if cluster is None else cluster}"
        found[key] = Pair(SUITE, task, "/".join(key), group, float(exact), float(policy))
    if not found:
        raise ValueError("pairs: there are none; give at least one (task, item, cluster, score_exact, score_candidate)")
    return list(found.values())
