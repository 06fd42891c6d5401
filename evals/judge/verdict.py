"""From records to verdicts: a pure function, the rules of the gate in order.

1. A row is *invalid* unless its records can be trusted (``verdict_validity``).
2. Slices where the exact run is not competent are *not evaluable* and leave the scope. With too few items to say, a
   slice is inconclusive instead, and so is the row. A suite without an evaluable slice makes the row not evaluable.
   Where somebody looked more than once (``sequential``) a slice leaves the scope only if the exact run is proved to
   be under the floor at any stopping time, and passes only if it is proved to be above it. Between the two it can
   enable nothing, but a loss that is proved there still blocks: otherwise a policy could be let off by stopping early
   (``verdict_strata``).
3. *Enable* when every suite is non-inferior at its margin and every remaining slice at its own. None of these tests is
   corrected for the others: all must succeed, so the chance that a row with a loss in any one of them is enabled
   stays at most alpha (intersection-union test, Berger 1982, Technometrics 24).
4. *Block* when a loss beyond the margin is proved somewhere. Here one success is enough, so the strata share one
   alpha: the weighted mean of their e-values (half the weight over suites, half over slices, fixed by the plan) must
   reach 1/alpha. Strata that are not evaluable keep their weight and add nothing, which only lowers the mean.
5. Budgets of one policy are tested from large to small and testing stops at the first that is not enabled, so the
   family needs no correction (fixed sequence: Maurer, Hothorn & Lehmacher 1995). Budgets that covered every item are
   passed over.
6. Output lengths must agree in every suite, and no small group may have collapsed (``slice_alarm``).

Pairs whose budget covers the whole item say nothing about eviction: they are checked to be identical, counted and
left out. Otherwise short items would dilute the loss on long ones.

The suite's test uses evaluable slices only. Which slices those are depends on the exact run's scores, and a slice is
kept for high ones, which lowers ``policy - exact`` there: the selection can only make enabling harder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.pairs import Pair, Row, by_suite, pairs_of, rows_of
from kvgate.evals.judge.rules import JudgedSuite, judge_suite, row_evidence, row_status, share_alpha
from kvgate.evals.judge.scope import scope_of
from kvgate.evals.judge.types import RowVerdict, Status
from kvgate.evals.judge.validity import problems
from kvgate.evals.log.records import CellRecord


def decide(
    records: Iterable[CellRecord],
    gate: Gate,
    *,
    repeat_identical: bool | None = None,
    declared: Mapping[str, str] | None = None,
    sequential: bool = False,
) -> list[RowVerdict]:
    """Verdicts on every (policy label, protocol) among ``records``, in order of family and falling budget.

    Args:
        records: both sides of every pair, in any order.
        repeat_identical: whether the exact run, repeated, gave the same tokens; None (nobody checked) makes rows
            invalid.
        declared: label to the reason why something outside the records makes it invalid: an oracle, state that leaks.
        sequential: whether what the records said decided how many there are, as under ``--until-decided``.
    """
    rows = sorted(rows_of(records), key=lambda row: (row.family, -row.budget, row.label))
    return in_sequence([_verdict(row, gate, repeat_identical, declared or {}, sequential) for row in rows])


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


def _verdict(
    row: Row, gate: Gate, repeat_identical: bool | None, declared: Mapping[str, str], sequential: bool
) -> RowVerdict:
    invalid = problems(row, repeat_identical, declared)
    if invalid:
        return _assemble(row, gate, "invalid", invalid, [], [])
    pairs = pairs_of(row)
    acting = [pair for pair in pairs if not pair.policy.covered]
    suites = by_suite(acting).items()
    judged = share_alpha([judge_suite(suite, found, gate, sequential=sequential) for suite, found in suites], gate)
    status, reasons = row_status(judged, gate)
    if not acting:
        reasons = [f"the budget covers all {len(pairs)} items, so nothing was evicted and nothing was tested"]
    return _assemble(row, gate, status, reasons, judged, pairs)


def _assemble(
    row: Row, gate: Gate, status: Status, reasons: Sequence[str], judged: Sequence[JudgedSuite], pairs: Sequence[Pair]
) -> RowVerdict:
    slices = tuple(entry for part in judged for entry in part.slices)
    evaluable = [entry for entry in slices if entry.status != "not_evaluable"]
    acting = [pair for pair in pairs if not pair.policy.covered]
    capped_exact, capped_policy = (sum(record.capped for record in side) for side in (row.exact, row.cells))
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
        flags=tuple(_flags(row, capped_exact, capped_policy, len(pairs) - len(acting))),
        suites=tuple(part.suite for part in judged),
        slices=slices,
        worst_slice=min(evaluable, key=lambda entry: (entry.difference, entry.lower)).name if evaluable else None,
        scope=scope_of(row.protocol, pairs, judged),
        lengths=tuple(part.lengths for part in judged),
        items=len(acting),
        clusters=len({(pair.policy.suite, pair.cluster) for pair in acting}),
        covered_items=len(pairs) - len(acting),
        native=all(cell.native for cell in row.cells),
        capped_exact=capped_exact,
        capped_policy=capped_policy,
        log_e_block_row=row_evidence(judged) if judged else -math.inf,
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
