"""Policies and records made to fool the gate. None may be enabled, under any gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_records import made_cell

from kvgate.evals.judge.gates import Gate, gate_names, load_gate
from kvgate.evals.judge.sequential import SequentialVerdict
from kvgate.evals.judge.types import RowVerdict
from kvgate.evals.judge.verdict import decide
from kvgate.evals.log.records import CellRecord, TurnRecord

GATES = [load_gate(name) for name in gate_names()]
LENGTHS, DEPTHS = (512, 1024, 2048), (0.0, 0.25, 0.5, 0.75, 1.0)
Change = Callable[[CellRecord], CellRecord]


def cell(index: int, score: float, label: str) -> CellRecord:
    """Four tasks in turn; every length at every depth."""
    layout = {"task": f"task{index % 4}", "length": LENGTHS[index % 3], "depth": DEPTHS[index // 3 % 5]}
    return made_cell(index, score, label, **layout)


def score(value: float) -> Change:
    return lambda record: replace(record, score=value, turns=(replace(record.turns[0], score=value),))


def build(
    n: int, change: Callable[[int], Change | None], exact: Callable[[int], float] = lambda i: 1.0
) -> list[CellRecord]:
    """A lossless policy on n items, except where ``change`` says otherwise."""
    records = [cell(index, exact(index), "full") for index in range(n)]
    for index in range(n):
        honest, trick = cell(index, exact(index), "trick@128"), change(index)
        records.append(trick(honest) if trick else honest)
    return records


def order_of(records: Iterable[CellRecord]) -> list[str]:
    return list(dict.fromkeys(record.item_hash for record in sorted(records, key=lambda record: record.index)))


def edit(**changes: Any) -> Change:
    return lambda record: replace(record, **changes)


def verdicts(records: Iterable[CellRecord], **options: Any) -> list[RowVerdict]:
    records = list(records)
    rows = [decide(records, gate, **{"repeat_identical": True, **options}) for gate in GATES]
    assert all(len(found) == 1 for found in rows)
    return [row for found in rows for row in found]


def statuses(records: Iterable[CellRecord], **options: Any) -> set[str]:
    return {row.status for row in verdicts(records, **options)}


def test_the_honest_policy_is_enabled_by_every_gate() -> None:
    assert statuses(build(1350, lambda index: None)) == {"enable"}


@pytest.mark.parametrize("n", [60, 1350])
def test_right_on_average_destroys_one_slice(n: int) -> None:
    """The slice (1024, .25) is lost whole; a gain elsewhere makes up for it."""

    def change(index: int) -> Change | None:
        place = index % 3, index // 3 % 5
        return score(0.0) if place == (1, 1) else score(1.0) if place == (2, 2) else None

    records = build(n, change, exact=lambda index: 0.0 if (index % 3, index // 3 % 5) == (2, 2) else 1.0)
    assert "enable" not in statuses(records)


@pytest.mark.parametrize("n", [60, 1350])
def test_destroys_one_task_of_four(n: int) -> None:
    assert "enable" not in statuses(build(n, lambda index: score(0.0) if index % 4 == 3 else None))


def test_evicts_nothing() -> None:
    rows = verdicts(build(1350, lambda index: edit(evicted_tokens=0.0)))
    assert {row.status for row in rows} == {"invalid"}
    assert "1350 of 1350 policy cells evicted nothing" in rows[0].reasons[0]


def test_evicts_nothing_once_in_a_while() -> None:
    assert statuses(build(1350, lambda index: edit(evicted_tokens=0.0) if index == 700 else None)) == {"invalid"}


def test_claims_to_be_covered() -> None:
    assert statuses(build(1350, lambda index: edit(evicted_tokens=0.0, covered=True))) == {"invalid"}


def test_claims_to_be_covered_by_a_huge_budget() -> None:
    """True this time, and worth nothing: no cell evicted anything."""
    change = edit(evicted_tokens=0.0, covered=True, budget=4096)
    assert statuses(build(1350, lambda index: change)) == {"not_evaluable"}


def test_covered_but_answers_otherwise() -> None:
    def change(index: int) -> Change:
        turns = (TurnRecord("q1", 1.0, (9,), "z", False),)
        return edit(evicted_tokens=0.0, covered=True, budget=4096, **({"turns": turns} if index == 5 else {}))

    assert statuses(build(1350, change)) == {"invalid"}


def test_drops_everything() -> None:
    assert "enable" not in statuses(build(1350, lambda index: score(0.0)))
    assert "block" in statuses(build(60, lambda index: score(0.0)))


def test_answers_shorter() -> None:
    rows = verdicts(build(1350, lambda index: edit(output_tokens=2)))
    assert {row.status for row in rows} == {"inconclusive"}
    assert all("ratio 0.67" in row.reasons[-1] for row in rows)


def test_rambles() -> None:
    assert statuses(build(1350, lambda index: edit(output_tokens=30) if index % 50 == 0 else None)) == {"inconclusive"}


def test_nan_logits() -> None:
    assert statuses(build(1350, lambda index: edit(nan=True) if index == 3 else None)) == {"invalid"}


@pytest.mark.parametrize("value", [1.0001, -0.1, math.nan, math.inf])
def test_scores_out_of_range(value: float) -> None:
    rows = verdicts(build(1350, lambda index: score(value) if index == 7 else None))
    assert {row.status for row in rows} == {"invalid"}
    assert "1 of 1350 policy records have a score outside [0, 1]" in rows[0].reasons[0]


def test_score_is_not_that_of_its_turns() -> None:
    assert statuses(build(1350, lambda index: edit(score=0.9) if index == 7 else None)) == {"invalid"}


def test_one_sided_items() -> None:
    """Leaving out the items that went wrong, on either side."""
    records = build(1350, lambda index: score(0.0) if index % 4 == 0 else None)
    without_policy = [record for record in records if record.score > 0.0]
    rows = verdicts(without_policy)
    assert {row.status for row in rows} == {"invalid"}
    assert "338 of 1350 items have no policy record" in rows[0].reasons[0]
    kept = {record.item_hash for record in without_policy if record.label != "full"}
    assert statuses(record for record in records if record.label != "full" or record.item_hash in kept) == {"invalid"}


def test_no_exact_run_at_all() -> None:
    assert statuses(record for record in build(1350, lambda index: None) if record.label != "full") == {"invalid"}


def test_duplicated_items() -> None:
    records = build(40, lambda index: None)
    assert statuses(records * 30) == {"invalid"}


def test_copies_of_one_context_under_new_hashes() -> None:
    """40 contexts asked 30 times each are 40 observations."""
    records = [
        replace(record, context_hash=f"context{record.index % 40}", cluster=f"c{record.index % 40}")
        for record in build(1200, lambda index: None)
    ]
    rows = {row.gate: row for row in verdicts(records)}
    assert rows["production"].clusters == 40
    assert rows["production"].status != "enable"
    assert rows["strict"].status != "enable"


def test_sides_of_different_slices() -> None:
    assert statuses(build(1350, lambda index: edit(length=512) if index == 1 else None)) == {"invalid"}


def test_records_of_two_runs() -> None:
    assert statuses(build(1350, lambda index: edit(config_hash="other") if index == 1 else None)) == {"invalid"}


def test_two_policies_under_one_label() -> None:
    assert statuses(build(1350, lambda index: edit(policy="full2") if index > 700 else None)) == {"invalid"}
    assert statuses(build(1350, lambda index: edit(budget=2000) if index > 700 else None)) == {"invalid"}


def test_exact_run_that_does_not_repeat() -> None:
    records = build(1350, lambda index: None)
    assert statuses(records, repeat_identical=False) == {"invalid"}
    assert statuses(records, repeat_identical=None) == {"invalid"}


def test_declared_oracle() -> None:
    rows = verdicts(build(1350, lambda index: None), declared={"trick@128": "reads the position of the answer"})
    assert {row.status for row in rows} == {"invalid"}
    assert rows[0].reasons == ("reads the position of the answer",)


def test_good_for_200_items_then_bad() -> None:
    """Looked at every 15 items. Screen settles for few items by design, which is why it may only shadow."""
    for gate in (gate for gate in GATES if not gate.shadow_only):
        records = build(1350, lambda index: score(0.0) if index >= 200 else None)
        sequential = SequentialVerdict(gate, order_of(records), repeat_identical=True)
        while not sequential.decided:
            start = sum(record.label == "full" for record in sequential_records(sequential))
            rows = sequential.feed(record for record in records if start <= record.index < start + 15)
            assert rows[0].status != "enable"
        assert sequential.verdicts[0].status == "block"


def sequential_records(sequential: SequentialVerdict) -> list[CellRecord]:
    return sequential._records


def test_sequential_refuses_a_cluster_in_two_batches() -> None:
    batch = build(15, lambda index: None)
    sequential = SequentialVerdict(GATES[0], [*order_of(batch), *order_of(batch)], repeat_identical=True)
    sequential.feed(batch)
    with pytest.raises(ValueError, match=r"cluster 'cluster0' .* two batches"):
        sequential.feed(batch[:1])


def test_sequential_stops_when_larger_budget_is_blocked() -> None:
    """A smaller budget can no longer be enabled, so nobody waits for it."""
    gate = Gate("test", 0.1, 0.2, min_items=30, min_clusters=30, min_slice_clusters=10, slice_by=())
    exact = [cell(index, 1.0, "full") for index in range(60)]
    large = [score(0.0)(cell(index, 1.0, "trick@256")) for index in range(60)]
    large = [replace(record, budget=256, params={"budget": 256}) for record in large]
    small = [score(float(index % 8 > 0))(cell(index, 1.0, "trick@128")) for index in range(60)]
    sequential = SequentialVerdict(gate, order_of(exact), repeat_identical=True)
    assert not sequential.decided
    rows = sequential.feed(exact + large + small)
    assert [row.status for row in rows] == ["block", "inconclusive"]
    assert sequential.decided


@pytest.mark.slow
def test_false_enables_under_peeking() -> None:
    """200 policies that lose exactly the margin, looked at every 30 items through the whole of ``decide``."""
    gate = Gate("test", 0.1, 0.3, min_items=20, min_clusters=20, min_slice_clusters=20, slice_by=(), slice_alarm=1.0)
    rng = np.random.default_rng(11)
    enabled = 0
    for _ in range(200):
        lost = rng.random(240) < 0.1
        records = build(240, lambda index, lost=lost: score(0.0) if lost[index] else None)  # type: ignore[misc]
        by_index = sorted(records, key=lambda record: record.index)
        sequential = SequentialVerdict(gate, order_of(by_index), repeat_identical=True)
        for start in range(0, 480, 60):
            row = sequential.feed(by_index[start : start + 60])[0]
            if row.status == "enable":
                enabled += 1
                break
    assert enabled / 200 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)
