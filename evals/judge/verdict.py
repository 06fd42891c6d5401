"""From records to verdicts: a pure function, the rules of the gate in order.

1. A row is *invalid* unless its records can be trusted (``validity``).
2. Slices where the exact run is not competent are *not evaluable* and leave the scope. With too few items to say, a
   slice is inconclusive instead, and so is the row. A suite without an evaluable slice makes the row not evaluable.
   Leaving a slice out hides no loss: a loss that is proved there blocks like any other, and the row is enabled only if
   each slice that was left out is shown to lose no more than ``m_slice / floor`` of what the exact run gets right
   there, the largest share that a judged slice may lose, or no more than ``m_suite`` (``strata``).
   Where somebody looked more than once (``sequential``) a slice leaves the scope only if the exact run is proved to
   be under the floor at any stopping time, and passes only if it is proved to be above it.
3. *Enable* when every suite is non-inferior at its margin and every remaining slice at its own. None of these tests is
   corrected for the others: all must succeed, so the chance that a row with a loss in any one of them is enabled
   stays at most alpha (intersection-union test, Berger 1982, Technometrics 24).
4. *Block* when a loss beyond the margin is proved somewhere. Here one success is enough, so the strata share one
   alpha: the weighted mean of their e-values (half the weight over suites, half over slices, fixed by the plan) must
   reach 1/alpha.
5. Selection. The best of many rows is not a single test, so the gate's alpha for enabling is shared by the families of
   a run, in equal parts (Bonferroni). Inside a family budgets are tested from large to small and testing stops at the
   first that is not enabled, which needs no correction (fixed sequence: Maurer, Hothorn & Lehmacher 1995). Budgets
   that covered every item are passed over, and rows that nothing could enable take no part. A plan that names one row
   in advance gives it the whole alpha, and enables no other. Blocks are each row's own.
6. Output lengths must agree in every suite, no small group may have collapsed (``slice_alarm``), and the resident
   bytes must have fallen by what the label promises (``memory``).

Pairs whose budget covers the whole item say nothing about eviction: they are checked to be identical, counted and
left out. Otherwise short items would dilute the loss on long ones.

The suite's test uses evaluable slices only. Which slices those are depends on the exact run's scores, and a slice is
kept for high ones, which lowers ``policy - exact`` there: the selection can only make enabling harder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvgate.evals.judge.columns import columns_of
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.memory import held_too_much
from kvgate.evals.judge.pairs import Row, acting_pairs, rows_of
from kvgate.evals.judge.rules import JudgedSuite, judge_row, row_evidence
from kvgate.evals.judge.scope import scope_of
from kvgate.evals.judge.types import Levels, RowVerdict, Status
from kvgate.evals.judge.validity import problems
from kvgate.evals.log.records import CellRecord

PAGE_SIZE = 16


def decide(
    records: Iterable[CellRecord],
    gate: Gate,
    *,
    repeat_identical: bool | None = None,
    declared: Mapping[str, str] | None = None,
    sequential: bool = False,
    named: str | None = None,
    page_size: int = PAGE_SIZE,
) -> list[RowVerdict]:
    """Verdicts on every (policy label, protocol) among ``records``, in order of family and falling budget.

    Args:
        records: both sides of every pair, in any order.
        repeat_identical: whether the exact run, repeated, gave the same tokens; None (nobody checked) makes rows
            invalid.
        declared: label to the reason why something outside the records makes it invalid: an oracle, state that leaks.
        sequential: whether what the records said decided how many there are, as under ``--until-decided``.
        named: the label that the plan names in advance as the one it is about; None: all rows share the gate's alpha.
        page_size: token slots of a page, for the rule of memory.
    """
    rows = sorted(rows_of(records), key=lambda row: (row.family, -row.budget, row.label))
    shares = shared_alpha(rows, gate.alpha, declared or {}, named)

    def judged(row: Row) -> RowVerdict:
        levels = Levels(shares[row.label, row.protocol], gate.alpha, sequential)
        invalid = problems(row, repeat_identical, declared or {})
        return (
            _assemble(row, gate, levels, "invalid", invalid, []) if invalid else _verdict(row, gate, levels, page_size)
        )

    verdicts = [judged(row) for row in rows]
    return in_sequence(verdicts) if named is None else [_only(verdict, named) for verdict in verdicts]


def shared_alpha(
    rows: Sequence[Row], alpha: float, declared: Mapping[str, str], named: str | None
) -> dict[tuple[str, str], float]:
    """Each row's part of ``alpha``, by label and protocol, from what is known before any score."""
    able = [row for row in rows if row.label not in declared and not row.covered and named in (None, row.label)]
    share = alpha / max(1, len({row.family for row in able}))
    return {(row.label, row.protocol): share if named in (None, row.label) else alpha for row in rows}


def _only(verdict: RowVerdict, named: str) -> RowVerdict:
    """A row beside the one that the plan is about enables nothing."""
    if verdict.label == named:
        return verdict
    verdict = replace(verdict, alpha_enable=0.0)
    if verdict.status != "enable":
        return verdict
    reason = f"not tested: the plan names {named} in advance as the one row that it may enable"
    return replace(verdict, status="inconclusive", reasons=(reason,))


def in_sequence(verdicts: Sequence[RowVerdict]) -> list[RowVerdict]:
    """Rule 5, over rows in order of family and falling budget."""
    stopped: dict[str, RowVerdict] = {}
    result = []
    for verdict in verdicts:
        first = stopped.get(verdict.family)
        if verdict.status == "enable" and first is not None:
            reason = f"not tested: {first.label} keeps more and is {first.status}; budgets go from large to small"
            verdict = replace(verdict, status="inconclusive", reasons=(reason,))
        if verdict.status != "enable" and not nothing_tested(verdict):
            stopped.setdefault(verdict.family, verdict)
        result.append(verdict)
    return result


def nothing_tested(verdict: RowVerdict) -> bool:
    """Whether the budget held every item whole, so that the row says nothing about eviction."""
    return verdict.status == "not_evaluable" and verdict.items == 0


def _verdict(row: Row, gate: Gate, levels: Levels, page_size: int) -> RowVerdict:
    pairs = acting_pairs(row, gate)
    status, reasons, judged = judge_row(columns_of(pairs), gate, levels)
    if not pairs:
        reasons = [f"the budget covers all {len(row.cells)} items, so nothing was evicted and nothing was tested"]
    held = held_too_much(row.cells, gate, page_size)
    if held and status in {"enable", "inconclusive"}:
        status, reasons = "inconclusive", held + (reasons if status == "inconclusive" else [])
    return _assemble(row, gate, levels, status, reasons, judged)


def _assemble(
    row: Row, gate: Gate, levels: Levels, status: Status, reasons: Sequence[str], judged: Sequence[JudgedSuite]
) -> RowVerdict:
    slices = tuple(entry for part in judged for entry in part.slices)
    evaluable = [entry for entry in slices if entry.status != "not_evaluable"]
    items = sum(part.data.layout.items for part in judged)
    covered = len(row.cells) - items if status != "invalid" else 0
    capped_exact, capped_policy = (sum(record.capped for record in side) for side in (row.exact, row.cells))
    lengths = {cell.length for cell in row.cells} if status != "invalid" else set()
    return RowVerdict(
        label=row.label,
        policy=row.cells[0].policy,
        family=row.family,
        protocol=row.protocol,
        budget=row.budget,
        ratio=row.cells[0].ratio,
        gate=gate.name,
        status=status,
        reasons=tuple(reasons),
        flags=tuple(_flags(row, capped_exact, capped_policy, covered)),
        suites=tuple(part.suite for part in judged),
        slices=slices,
        worst_slice=min(evaluable, key=lambda entry: (entry.difference, entry.lower)).name if evaluable else None,
        scope=scope_of(row.protocol, lengths, judged, gate),
        lengths=tuple(part.lengths for part in judged),
        items=items,
        clusters=sum(len(set(part.data.layout.clusters)) for part in judged),
        covered_items=covered,
        native=all(cell.native for cell in row.cells),
        capped_exact=capped_exact,
        capped_policy=capped_policy,
        log_e_block_row=row_evidence(judged) if judged else -math.inf,
        alpha_enable=levels.enable,
    )


def _flags(row: Row, capped_exact: int, capped_policy: int, covered: int) -> list[str]:
    flags = []
    if capped_exact or capped_policy:
        flags.append(
            f"answers cut by their token cap: {capped_policy} of {len(row.cells)} of the policy's, {capped_exact} of "
            f"{len(row.exact)} of the exact run's; each is scored as it stands"
        )
    if covered:
        flags.append(f"{covered} items fit the budget whole and were left out")
    floored = sum(cell.floored for cell in row.cells)
    if floored:
        flags.append(f"{floored} items got the policy's smallest budget instead of the ratio's")
    return flags
