"""Rules that keep a loss from hiding: what is left out, the best of many rows, memory, order, clusters, gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import made_cell

from kvgate.evals.data.items import Exact, Item, Turn
from kvgate.evals.judge.gates import Gate, gate_names, load_gate
from kvgate.evals.judge.order import follows, order_hashes
from kvgate.evals.judge.sequential import SequentialVerdict
from kvgate.evals.judge.verdict import decide
from kvgate.evals.log.records import CellRecord
from kvgate.evals.run.dependence import joined, require_declared
from kvgate.evals.stats.betting import log_e_positive
from kvgate.evals.stats.dependence import intra_cluster_correlation

GATE = Gate("test", 0.03, 0.1, min_items=100, min_clusters=100, min_slice_clusters=30, slice_by=("length",))
LENGTHS = (512, 1024, 2048)


def side(scores: Any, label: str = "full", **changes: Any) -> list[CellRecord]:
    return [made_cell(i, float(score), label, length=LENGTHS[i % 3], **changes) for i, score in enumerate(scores)]


def weak_slice(share: float, kept: float, n: int = 900) -> list[CellRecord]:
    """At 2048 the exact run is right on ``share`` of the items, the policy on ``kept`` of these; elsewhere both are."""
    rng = np.random.default_rng(3)
    at = np.arange(n) % 3 == 2
    exact = np.where(at, rng.random(n) < share, True)
    policy = exact & (~at | (rng.random(n) < kept))
    return side(exact) + side(policy, "trick@128")


@pytest.mark.parametrize("share", [0.55, 0.62, 0.3])
def test_a_loss_in_a_slice_that_is_left_out_enables_nothing(share: float) -> None:
    (row,) = decide(weak_slice(share, 0.1), GATE, repeat_identical=True)
    assert row.status == "block"
    assert "length 2048" in " ".join(row.reasons)


def test_a_loss_too_small_for_the_margin_is_large_where_little_is_right() -> None:
    """Exact .09, policy .009: 8 points of score, under m_slice, but 90 % of what there was to lose."""
    (row,) = decide(weak_slice(0.09, 0.1), GATE, repeat_identical=True)
    assert row.status == "inconclusive"
    assert "left out, and not shown to be no worse" in row.reasons[0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.55])
def test_a_slice_without_loss_may_be_left_out(share: float) -> None:
    (row,) = decide(weak_slice(share, 1.0), GATE, repeat_identical=True)
    assert row.status == "enable"
    assert row.scope.excluded == ("retrieval, length 2048",)


def families(count: int, lost: int = 0, n: int = 170) -> list[CellRecord]:
    records = side([1.0] * n)
    for number in range(count):
        scores = [float(i >= lost) for i in range(n)]
        records += side(scores, f"p{number}@128", policy=f"p{number}", settings={})
    return records


def test_families_share_the_gates_alpha_for_enabling() -> None:
    """170 items without a difference give an e-value of 33: enough for one family, not for ten."""
    (alone,) = decide(families(1), replace(GATE, slice_by=()), repeat_identical=True)
    assert (alone.status, alone.alpha_enable) == ("enable", 0.05)
    rows = decide(families(10), replace(GATE, slice_by=()), repeat_identical=True)
    assert {row.status for row in rows} == {"inconclusive"}
    assert {row.alpha_enable for row in rows} == {0.005}
    assert "200 is needed" in rows[0].reasons[0]


def test_a_row_named_in_advance_has_the_whole_alpha_and_the_others_none() -> None:
    rows = decide(families(10), replace(GATE, slice_by=()), repeat_identical=True, named="p3@128")
    assert {row.label for row in rows if row.status == "enable"} == {"p3@128"}
    others = [row for row in rows if row.label != "p3@128"]
    assert {row.alpha_enable for row in others} == {0.0}
    assert "not tested: the plan names p3@128" in others[0].reasons[0]


def test_rows_that_nothing_can_enable_take_no_part_in_alpha() -> None:
    oracles = {f"p{number}@128": "an oracle" for number in range(1, 10)}
    rows = decide(families(10), replace(GATE, slice_by=()), repeat_identical=True, declared=oracles)
    assert [row.status for row in rows] == ["enable"] + ["invalid"] * 9


@pytest.mark.parametrize("held, status", [(1.0, "inconclusive"), (0.5, "inconclusive"), (0.3, "enable")])
def test_bytes_must_fall_by_what_the_label_promises(held: float, status: str) -> None:
    records = [
        made_cell(i, 1.0, label, length=512, resident_bytes=int(512_000 * (held if label != "full" else 1.0)))
        for label in ("full", "trick@128")
        for i in range(300)
    ]
    (row,) = decide(records, GATE, repeat_identical=True)
    assert row.status == status
    if status != "enable":
        assert f"{held:.1%} of the exact run's bytes stay resident" in row.reasons[0]


def test_what_is_judged_together_is_named() -> None:
    records = families(1)
    (row,) = decide(records, replace(GATE, slice_by=()), repeat_identical=True)
    assert row.scope.pooled == ("retrieval: 3 values of length judged together",)
    (row,) = decide(records, GATE, repeat_identical=True)
    assert row.scope.pooled == ()


def test_every_shipped_gate_tells_tasks_apart() -> None:
    for name in gate_names():
        assert any("task" in keys for keys in load_gate(name).groupings)


def test_looks_in_any_other_order_are_refused() -> None:
    records = families(1)
    order = [record.item_hash for record in records if record.exact]
    sequential = SequentialVerdict(GATE, order, repeat_identical=True)
    sequential.feed(record for record in records if record.item_hash in order[:30])
    with pytest.raises(ValueError, match="out of the order that was drawn before the run"):
        sequential.feed(record for record in records if record.item_hash in order[60:90])
    drawn = order_hashes([order[:30], order[30:60]])
    assert follows(order[:60], drawn, 2)
    assert not follows(order[:30], drawn, 2)
    assert not follows([*order[1:30], order[0]], drawn, 1)
    assert not follows(order[:60], drawn, 3)


def item(index: int, context: tuple[int, ...], cluster: str, **changes: Any) -> Item:
    return Item("s", "t", index, 512, context, (Turn((1,), Exact(("x",))),), cluster, **changes)


def test_items_that_share_a_document_must_share_a_cluster() -> None:
    document = tuple(range(400))
    alike = [item(0, (*document, 1), "a"), item(1, (*document, 2), "b")]
    with pytest.raises(ValueError, match="begin with the same 400 tokens of context"):
        require_declared(alike)
    require_declared([replace(each, cluster="a") for each in alike])
    require_declared([item(0, (*document[:100], *range(900, 1200)), "a"), alike[1]])
    require_declared([replace(each, protected=((0, 300),)) for each in alike])
    assert len({each.cluster for each in joined(alike)}) == 1


def test_records_of_one_context_in_two_clusters_are_invalid() -> None:
    records = [replace(record, context_hash=f"x{record.index // 2}") for record in families(1)]
    (row,) = decide(records, GATE, repeat_identical=True)
    assert row.status == "invalid"
    assert "85 contexts are shared by items of different clusters" in row.reasons[0]


def test_intra_cluster_correlation() -> None:
    rng = np.random.default_rng(0)
    place = np.repeat(np.arange(400), 5)
    apart, alike = rng.normal(size=2000), np.repeat(rng.normal(size=400), 5)
    found = [intra_cluster_correlation(values, place) for values in (apart, alike, apart + alike)]
    assert found == [pytest.approx(0.0, abs=0.05), pytest.approx(1.0), pytest.approx(0.5, abs=0.06)]
    assert intra_cluster_correlation([1.0, 2.0], [0, 1]) is None
    assert intra_cluster_correlation([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]) is None


def test_the_e_value_for_surplus_holds_its_level() -> None:
    """Mean 0, from -.8 to 4: rarely large, often a little below zero."""
    rng = np.random.default_rng(1)
    hits = sum(
        log_e_positive(np.where(rng.random(150) < 1 / 6, 4.0, -0.8), 0.8) >= np.log(20.0) for _ in range(1000)
    )  # fmt: skip
    assert hits / 1000 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 1000)
    assert log_e_positive([0.2] * 40, 0.8) > np.log(20.0)
    with pytest.raises(ValueError, match=r"at least -0\.8"):
        log_e_positive([-0.9], 0.8)


def test_a_lax_gate_cannot_call_itself_production(tmp_path: Path) -> None:
    path = tmp_path / "lax.yaml"
    path.write_text("name: production\nm_suite: 0.3\nm_slice: 0.5\n")
    with pytest.raises(ValueError, match="its rules are not those of the gate production that comes with kvgate"):
        load_gate(path)
    path.write_text("name: lax\nm_suite: 0.3\nm_slice: 0.5\n")
    lax = load_gate(path)
    assert not lax.shipped
    assert lax.content_hash != load_gate("production").content_hash
    assert load_gate("production").shipped
    assert not replace(lax, name="production").shipped
