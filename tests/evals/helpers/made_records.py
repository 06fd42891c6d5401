"""Records made by hand, for tests of verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvgate.evals.log.records import CellRecord, TurnRecord


def made_cell(index: int, score: float, label: str = "full", **changes: Any) -> CellRecord:
    """One sound record with a cluster and a context of its own, except for ``changes``; ``full`` is the exact run."""
    exact = label == "full"
    suite, length = changes.get("suite", "retrieval"), changes.get("length", 512)
    budget = None if exact else changes.get("budget", 128)
    record = CellRecord(
        cell_id=f"{suite}-{index}-{label}",
        config_hash="config",
        suite=suite,
        task="task",
        index=index,
        length=length,
        depth=None,
        cluster=f"cluster{index}",
        item_hash=f"{suite}-{index:05d}",
        context_hash=f"{suite}-context{index}",
        protocol="question_unseen",
        policy="full" if exact else "trick",
        label=label,
        params={} if exact else {"budget": budget},
        budget=budget,
        ratio=None,
        score=score,
        turns=(TurnRecord("q1", score, (1, 2, 3), "abc", False),),
        evicted_tokens=0.0 if exact else 100.0,
        native=False,
        covered=False,
        floored=False,
        resident_bytes=1000 * min(length, budget or length),
        logical_bytes=1,
        exact_resident_bytes=1000 * length,
        context_tokens=length,
        output_tokens=3,
        nan=False,
    )
    return replace(record, **changes)
