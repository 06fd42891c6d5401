"""Where a policy loses: by length and depth, by instruction, by memory. Pure, from records to plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvgate.evals.judge.gates import Gate
from kvgate.evals.log.records import CellRecord, TurnRecord


def grid(cells: Iterable[CellRecord], gate: Gate) -> list[dict[str, Any]]:
    """Mean score by suite, length and depth bin (None: the item has no depth), in that order.

    ``clusters``: items that share a context count as one. ``evidence_kept``: mean share of the evidence that is still
    attended; None where no item says where it stands.
    """
    groups: dict[tuple[str, int, str | None], list[CellRecord]] = defaultdict(list)
    for cell in cells:
        groups[cell.suite, cell.length, gate.depth_bin(cell.depth)].append(cell)
    order = sorted(groups, key=lambda key: (key[0], key[1], key[2] is not None, key[2] or ""))
    return [
        {
            "suite": suite,
            "length": length,
            "depth": depth,
            "items": len(groups[suite, length, depth]),
            "clusters": len({cell.cluster for cell in groups[suite, length, depth]}),
            "score": mean(cell.score for cell in groups[suite, length, depth]),
            "evidence_kept": mean(
                cell.evidence_kept for cell in groups[suite, length, depth] if cell.evidence_kept is not None
            ),
        }
        for suite, length, depth in order
    ]


def survival(cells: Iterable[CellRecord], exact: Mapping[str, CellRecord]) -> list[dict[str, Any]]:
    """Answers by suite, task and turn label, so that one instruction that is silently lost shows.

    ``right``: answers for which the exact run scored above zero; ``survived``: those for which the policy scored at
    least as much. ``exact``, ``policy``: mean scores. ``exact`` maps item hashes to the exact side.
    """
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for cell in cells:
        for _, ours, theirs in turn_pairs(exact[cell.item_hash], cell):
            groups[cell.suite, cell.task, ours.label].append((ours.score or 0.0, theirs.score or 0.0))
    return [
        {
            "suite": suite,
            "task": task,
            "turn": turn,
            "answers": len(pairs),
            "exact": mean(before for before, _ in pairs),
            "policy": mean(after for _, after in pairs),
            "right": sum(before > 0.0 for before, _ in pairs),
            "survived": sum(after >= before > 0.0 for before, after in pairs),
        }
        for (suite, task, turn), pairs in sorted(groups.items())
    ]


def turn_pairs(exact: CellRecord, policy: CellRecord) -> list[tuple[int, TurnRecord, TurnRecord]]:
    """Scored turns of both sides, beside each other, with their number among all turns."""
    pairs = enumerate(zip(exact.turns, policy.turns, strict=True))
    return [(number, ours, theirs) for number, (ours, theirs) in pairs if ours.score is not None]


def quality(cells: Iterable[CellRecord]) -> float | None:
    """Mean score, every suite counting once and every item the same within its suite."""
    suites: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        suites[cell.suite].append(cell.score)
    return mean(sum(scores) / len(scores) for scores in suites.values())


def mark_pareto(rows: Sequence[dict[str, Any]]) -> None:
    """Set ``pareto``: no row of the same protocol has both less resident memory and a better score.

    By point estimates; two rows may differ by less than their intervals. None for invalid rows, whose numbers say
    nothing.
    """
    for row in rows:
        rivals = [
            (rival["memory"]["resident_mib"], -rival["quality"])
            for rival in rows
            if rival["protocol"] == row["protocol"] and rival["status"] != "invalid"
        ]
        own = (row["memory"]["resident_mib"], -row["quality"])
        row["pareto"] = None if row["status"] == "invalid" else not any(_dominates(rival, own) for rival in rivals)


def _dominates(rival: tuple[float, float], own: tuple[float, float]) -> bool:
    return rival != own and all(theirs <= ours for theirs, ours in zip(rival, own, strict=True))


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else None
