"""The rules of the verdict, one by one, on records built by hand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from made_records import made_cell

from kvgate.evals.judge.gates import Gate, load_gate
from kvgate.evals.judge.pairs import merged_clusters
from kvgate.evals.judge.types import RowVerdict
from kvgate.evals.judge.verdict import decide
from kvgate.evals.log.records import CellRecord

GATE = Gate(
    "test",
    m_suite=0.1,
    m_slice=0.2,
    min_items=60,
    min_clusters=30,
    min_slice_clusters=20,
    slice_by=("length",),
    floor=0.5,
)
LENGTHS = (512, 1024)


def cell(index: int, score: float, label: str = "full", **changes: Any) -> CellRecord:
    """Three tasks, two lengths and five depths in turn."""
    layout = {"task": f"task{index % 3}", "length": LENGTHS[index % 2], "depth": (index % 5) / 4}
    return made_cell(index, score, label, **{**layout, **changes})


def run(policy: Callable[[int], float], n: int = 120, exact: float = 1.0, **changes: Any) -> list[CellRecord]:
    """Both sides of one suite; ``policy`` maps the index to the policy's score."""
    shared = {key: value for key, value in changes.items() if key in {"suite", "cluster"}}
    records = [cell(index, exact, **shared) for index in range(n)]
    return records + [cell(index, policy(index), "window@256", **changes) for index in range(n)]


def verdict(records: list[CellRecord], gate: Gate = GATE, **options: Any) -> RowVerdict:
    (row,) = decide(records, gate, **{"repeat_identical": True, **options})
    return row


def test_lossless_policy_is_enabled_with_numbers() -> None:
    row = verdict(run(lambda index: 1.0))
    assert row.status == "enable"
    assert (row.items, row.clusters, row.covered_items) == (120, 120, 0)
    (suite,) = row.suites
    assert (suite.exact, suite.policy, suite.difference) == (1.0, 1.0, 0.0)
    assert suite.lower > -GATE.m_suite
    assert suite.tango is not None
    assert row.scope.lengths == LENGTHS
    assert row.scope.longest_tokens == 1024
    assert row.scope.suites == ("retrieval",)
    assert [entry.name for entry in row.slices] == ["retrieval, length 512", "retrieval, length 1024"]
    assert "120 items" in row.reasons[0]
    json.dumps(row.to_dict(), allow_nan=False)


def test_proved_loss_is_blocked() -> None:
    row = verdict(run(lambda index: float(index % 2)))
    assert row.status == "block"
    assert row.log_e_block_row >= math.log(20.0)
    assert {entry.status for entry in row.suites} == {"inferior"}
    assert row.worst_slice == "retrieval, length 512"


def test_too_few_items_stay_inconclusive() -> None:
    row = verdict(run(lambda index: 1.0, n=40))
    assert row.status == "inconclusive"
    assert any("at least 60 items" in reason for reason in row.reasons)


def test_shipped_gates_on_forty_items_a_suite() -> None:
    """The quick plan: screen can enable a lossless policy, production cannot say."""
    records = [
        record
        for suite in ("retrieval", "code", "multi_turn")
        for index in range(40)
        for record in (
            cell(index, 1.0, suite=suite, length=(512, 1024, 2048)[index % 3]),
            cell(index, 1.0, "window@256", suite=suite, length=(512, 1024, 2048)[index % 3]),
        )
    ]
    assert verdict(records, load_gate("screen")).status == "enable"
    assert verdict(records, load_gate("production")).status == "inconclusive"
    assert verdict(records, load_gate("strict")).status == "inconclusive"


def test_incompetent_slice_leaves_the_scope() -> None:
    """The exact run fails at 1024: the policy is judged at 512 only."""
    records = [cell(i, float(i % 2 == 0)) for i in range(240)]
    records += [cell(i, float(i % 2 == 0), "window@256") for i in range(240)]
    row = verdict(records)
    assert row.status == "enable"
    assert row.scope.excluded == ("retrieval, length 1024",)
    assert row.scope.lengths == (512,)
    assert row.scope.longest_tokens == 512
    assert row.suites[0].items == 120


def test_incompetent_suite_is_not_evaluable() -> None:
    row = verdict(run(lambda index: 0.0, exact=0.0))
    assert row.status == "not_evaluable"
    assert "not competent on 2 of 2 slices" in row.reasons[0]


def test_padding_with_items_nobody_solves_dilutes_nothing() -> None:
    """12 % lost at 512; at 1024 nobody scores. Over all items the loss would be 6 %, under the margin of 10 %."""
    exact = [cell(i, float(i % 2 == 0)) for i in range(2000)]
    policy = [cell(i, float(i % 2 == 0 and i % 50 > 5), "window@256") for i in range(2000)]
    row = verdict(exact + policy)
    assert row.suites[0].difference == pytest.approx(-0.12)
    assert row.status != "enable"


def test_covered_items_are_left_out() -> None:
    """Short items fit the budget whole; the long ones are destroyed."""
    records = run(lambda index: float(index % 2 == 0))
    records = [
        replace(record, covered=True, evicted_tokens=0.0, budget=600)
        if record.label != "full" and record.length == 512
        else replace(record, budget=600 if record.label != "full" else None)
        for record in records
    ]
    row = verdict(records)
    assert row.status == "block"
    assert (row.items, row.covered_items) == (60, 60)
    assert row.scope.covered_lengths == (512,)


def covered(label: str = "window@4096") -> list[CellRecord]:
    return [
        cell(index, 1.0, label, covered=True, evicted_tokens=0.0, budget=4096, params={"window": 4096})
        for index in range(120)
    ]


def test_wholly_covered_policy_was_not_tested() -> None:
    row = verdict([cell(index, 1.0) for index in range(120)] + covered())
    assert row.status == "not_evaluable"
    assert "nothing was evicted" in row.reasons[0]


def test_budgets_go_from_large_to_small() -> None:
    def at(budget: int, score: Callable[[int], float]) -> list[CellRecord]:
        return [cell(i, score(i), f"w@{budget}", budget=budget, params={"window": budget}) for i in range(120)]

    exact = [cell(index, 1.0) for index in range(120)]
    good, bad, unclear = (lambda i: 1.0), (lambda i: float(i % 2)), (lambda i: float(i % 12 > 0))
    rows = decide(exact + at(128, good) + at(256, unclear) + at(400, good) + covered(), GATE, repeat_identical=True)
    assert [(row.label, row.status) for row in rows] == [
        ("window@4096", "not_evaluable"),
        ("w@400", "enable"),
        ("w@256", "inconclusive"),
        ("w@128", "inconclusive"),
    ]
    assert "not tested: w@256" in rows[3].reasons[0]
    rows = decide(exact + at(128, bad) + at(256, unclear), GATE, repeat_identical=True)
    assert [row.status for row in rows] == ["inconclusive", "block"]


def test_modes_of_a_policy_are_families_of_their_own() -> None:
    exact = [cell(index, 1.0) for index in range(120)]
    first = [cell(i, 0.0, "a@256", settings={"positions": "original"}) for i in range(120)]
    second = [cell(i, 1.0, "b@128", budget=128, settings={"positions": "rebased"}) for i in range(120)]
    assert [row.status for row in decide(exact + first + second, GATE, repeat_identical=True)] == ["block", "enable"]


def test_length_drift_withholds() -> None:
    row = verdict(run(lambda index: 1.0, output_tokens=2))
    assert row.status == "inconclusive"
    assert "ratio 0.67" in row.reasons[0]


def test_collapsed_group_withholds() -> None:
    """One depth of five lost all, which is 20 % of each length: margins of .4 and .45 do not object."""
    gate = replace(GATE, m_suite=0.4, m_slice=0.45, slice_alarm=0.5)
    row = verdict(run(lambda index: float(index % 5 != 2)), gate)
    assert row.status == "inconclusive"
    assert any("alarm" in reason and "0.4-0.6" in reason for reason in row.reasons)


def test_items_of_one_context_are_one_observation() -> None:
    records = run(lambda index: 1.0)
    records = [replace(record, context_hash=f"shared{record.index // 40}") for record in records]
    row = verdict([replace(record, cluster=f"c{record.index // 40}") for record in records])
    assert row.clusters == 3
    assert row.status == "inconclusive"
    row = verdict(records)  # the same without saying so
    assert row.status == "invalid"
    assert "3 contexts are shared by items of different clusters" in row.reasons[0]


def test_clusters_merge_through_contexts() -> None:
    cells = [cell(i, 1.0, cluster=f"c{i // 2}", context_hash=f"x{(i + 1) // 2}") for i in range(6)]
    assert len(set(merged_clusters(cells).values())) == 1
    cells = [cell(i, 1.0, cluster=f"c{i // 2}", context_hash=f"x{i}") for i in range(6)]
    assert len(set(merged_clusters(cells).values())) == 3


def test_losses_in_large_clusters_are_seen() -> None:
    """Ten clusters of ten lose everything among 290 single items: 3 % of clusters, 26 % of items."""

    def place(index: int) -> str:
        return f"large{index % 10}" if index < 100 else f"single{index}"

    records = [cell(i, 1.0, cluster=place(i), task="t", depth=None) for i in range(390)]
    records += [cell(i, float(i >= 100), "window@256", cluster=place(i), task="t", depth=None) for i in range(390)]
    row = verdict(records)
    assert row.suites[0].difference > -0.1
    assert row.suites[0].difference_items < -0.2
    assert row.status != "enable"


def test_order_of_records_does_not_matter() -> None:
    records = run(lambda index: float(index % 7 > 0))
    shuffled = list(records)
    random.Random(3).shuffle(shuffled)
    assert decide(records, GATE, repeat_identical=True) == decide(shuffled, GATE, repeat_identical=True)


def test_capped_answers_are_counted_not_judged() -> None:
    records = run(lambda index: 1.0)
    cut = [replace(record, turns=(replace(record.turns[0], capped=True),)) for record in records[:30]] + records[30:]
    row = verdict(cut)
    assert (row.status, row.capped_exact, row.capped_policy) == ("enable", 30, 0)
    assert "30 of 120 of the exact run's" in row.flags[0]


def test_native_eviction_needs_no_evicted_count() -> None:
    assert verdict(run(lambda index: 1.0, native=True, evicted_tokens=0.0)).status == "enable"


def test_no_records_no_verdict() -> None:
    assert decide([], GATE, repeat_identical=True) == []
    assert decide([cell(0, 1.0)], GATE, repeat_identical=True) == []
