"""Rule 1: what makes a row invalid, whatever its scores say.

An answer cut by its token cap invalidates nothing: the score stands as it is, and cut answers are counted on both
sides. Exact-match scores read the first line only, so that a hit before the cap cannot be undone by later text; a
miss counts against whichever side was cut. Where the cap is too short for the exact run, its competence floor shows
it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvgate.evals.judge.pairs import Row, family_of
from kvgate.evals.log.records import CellRecord

_SAME_ON_BOTH_SIDES = ("suite", "task", "index", "length", "depth", "cluster", "context_hash")
_TOLERANCE = 1e-9


def problems(row: Row, repeat_identical: bool | None, declared: Mapping[str, str]) -> list[str]:
    """Every reason why the row is invalid, each one sentence with numbers; empty for a valid row.

    Args:
        repeat_identical: whether the exact run, repeated, gave the same tokens; None when nobody checked.
        declared: reasons found outside the records, by label ("reads the answer's position", "order of items matters").
    """
    found = [declared[row.label]] if row.label in declared else []
    if repeat_identical is None:
        found.append("the exact run was not repeated, so its own reproducibility is unknown")
    elif not repeat_identical:
        found.append("the exact run repeated gives other tokens")
    found += _pairing(row) + _mixtures(row)
    found += _undeclared(row)
    found += _scores(row.cells, "policy") + _scores(row.exact, "exact")
    if not found:
        found += _sides_agree(row)
    return found + _eviction(row.cells)


def _pairing(row: Row) -> list[str]:
    exact = Counter(record.item_hash for record in row.exact)
    policy = Counter(record.item_hash for record in row.cells)
    found = []
    for side, counts in (("exact", exact), ("policy", policy)):
        twice = sorted(key for key, count in counts.items() if count > 1)
        if twice:
            found.append(f"{len(twice)} items occur more than once on the {side} side, {twice[0][:12]} first")
    for side, missing in (("exact", policy.keys() - exact.keys()), ("policy", exact.keys() - policy.keys())):
        if missing:
            total = len(exact.keys() | policy.keys())
            found.append(f"{len(missing)} of {total} items have no {side} record, {min(missing)[:12]} first")
    return found


def _mixtures(row: Row) -> list[str]:
    found = []
    for side, records in (("policy", row.cells), ("exact", row.exact)):
        configs = {record.config_hash for record in records}
        if len(configs) > 1:
            found.append(f"the {side} records come from {len(configs)} different configurations")
    families = sorted({family_of(cell) for cell in row.cells})
    if len(families) > 1:
        found.append(f"the label stands for {len(families)} different policies: {families[0]} and {families[1]}")
    ratios = {cell.ratio for cell in row.cells}
    if len(ratios) > 1:
        found.append(f"the label stands for {len(ratios)} different ratios")
    if len({cell.budget for cell in row.cells}) > 1 and any(cell.ratio is None for cell in row.cells):
        found.append(f"the label stands for {len({cell.budget for cell in row.cells})} different budgets")
    return found


def _undeclared(row: Row) -> list[str]:
    """Items that share a context must say so: whoever calls them independent may have counted more than was seen."""
    clusters: dict[tuple[str, str], set[str]] = defaultdict(set)
    for cell in row.cells:
        clusters[cell.suite, cell.context_hash].add(cell.cluster)
    split = sorted(key for key, names in clusters.items() if len(names) > 1)
    if not split:
        return []
    suite, context = split[0]
    names = ", ".join(sorted(clusters[split[0]])[:2])
    return [f"{len(split)} contexts are shared by items of different clusters, {suite} {context[:12]} first: {names}"]


def _scores(records: Sequence[CellRecord], side: str) -> list[str]:
    checks: dict[str, Callable[[CellRecord], bool]] = {
        "have a score outside [0, 1]": lambda record: not _in_range(record),
        "have a score that is not the mean of their scored turns": lambda record: (
            _in_range(record) and not _is_mean(record)
        ),
        "saw NaN in the logits": lambda record: record.nan,
    }
    return [_count(records, test, f"{side} records {text}") for text, test in checks.items() if any(map(test, records))]


def _in_range(record: CellRecord) -> bool:
    scores = [record.score, *(turn.score for turn in record.turns if turn.score is not None)]
    return all(0.0 <= score <= 1.0 for score in scores)


def _is_mean(record: CellRecord) -> bool:
    scores = [turn.score for turn in record.turns if turn.score is not None]
    return bool(scores) and abs(sum(scores) / len(scores) - record.score) <= _TOLERANCE


def _sides_agree(row: Row) -> list[str]:
    exact = {record.item_hash: record for record in row.exact}
    found = []
    for name in _SAME_ON_BOTH_SIDES:
        differing = [cell for cell in row.cells if getattr(cell, name) != getattr(exact[cell.item_hash], name)]
        if differing:
            found.append(f"{len(differing)} items have another {name} on the exact side")
    changed = [cell for cell in row.cells if cell.covered and _answers(cell) != _answers(exact[cell.item_hash])]
    if changed:
        found.append(
            f"{len(changed)} items were answered differently although the budget covers them, "
            f"{changed[0].item_hash[:12]} first: the policy path is not the exact path"
        )
    return found


def _answers(record: CellRecord) -> list[tuple[tuple[int, ...], int | None]]:
    return [(turn.tokens, turn.chosen) for turn in record.turns]


def _eviction(cells: Sequence[CellRecord]) -> list[str]:
    def kept_all(cell: CellRecord) -> bool:
        return not (cell.evicted_tokens > 0.0 and math.isfinite(cell.evicted_tokens)) and not cell.native

    checks: dict[str, Callable[[CellRecord], bool]] = {
        "evicted nothing although the budget is smaller than the length": lambda cell: (
            kept_all(cell) and not cell.covered
        ),
        "say that the budget covers them but it does not, or something was evicted": lambda cell: (
            cell.covered and (cell.budget is None or cell.budget < cell.context_tokens or cell.evicted_tokens > 0.0)
        ),
    }
    return [_count(cells, test, f"policy cells {text}") for text, test in checks.items() if any(map(test, cells))]


def _count(records: Iterable[CellRecord], test: Callable[[CellRecord], bool], text: str) -> str:
    records = list(records)
    hits = [record for record in records if test(record)]
    return f"{len(hits)} of {len(records)} {text}, item {hits[0].item_hash[:12]} first"
