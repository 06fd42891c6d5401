"""Answers that went wrong, side by side: a few for every row, chosen the same way every time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvgate.evals.leaderboard.slices import turn_pairs
from kvgate.evals.log.records import CellRecord, TurnRecord

PER_ROW = 3
LONGEST = 280  # characters of an answer that are shown


def disagreements(
    cells: Iterable[CellRecord], exact: Mapping[str, CellRecord], most: int = PER_ROW
) -> list[dict[str, Any]]:
    """The largest losses, suites and tasks taking turns; ties by cell id. One turn of an item at most.

    ``facts_kept`` is the record's; ``turn_index`` counts the item's turns, fillers included.
    """
    losses: dict[tuple[str, str], list[tuple[float, str, CellRecord, int]]] = {}
    for cell in cells:
        pairs = turn_pairs(exact[cell.item_hash], cell)
        loss, place = max(((ours.score or 0.0) - (theirs.score or 0.0), -number) for number, ours, theirs in pairs)
        if loss > 0.0:
            losses.setdefault((cell.suite, cell.task), []).append((-loss, cell.cell_id, cell, -place))
    queues = {key: sorted(found, key=lambda entry: entry[:2]) for key, found in losses.items()}
    chosen: list[dict[str, Any]] = []
    shown: dict[str, int] = {}
    while len(chosen) < most and any(queues.values()):
        key = min((key for key in queues if queues[key]), key=lambda key: (shown.get(key[0], 0), queues[key][0][:2]))
        _, _, cell, place = queues[key].pop(0)
        shown[key[0]] = shown.get(key[0], 0) + 1
        chosen.append(_example(cell, exact[cell.item_hash], place))
    return chosen


def _example(cell: CellRecord, exact: CellRecord, place: int) -> dict[str, Any]:
    return {
        "cell_id": cell.cell_id,
        "item_hash": cell.item_hash,
        "suite": cell.suite,
        "task": cell.task,
        "index": cell.index,
        "length": cell.length,
        "depth": cell.depth,
        "turn": cell.turns[place].label,
        "turn_index": place,
        "exact": _answer(exact.turns[place]),
        "policy": _answer(cell.turns[place]),
        "facts_kept": cell.facts_kept,
    }


def _answer(turn: TurnRecord) -> dict[str, Any]:
    return {"score": turn.score, "text": turn.text[:LONGEST], "cut": len(turn.text) > LONGEST}
