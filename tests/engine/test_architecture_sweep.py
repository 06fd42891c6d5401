"""The sweep over all causal classes of transformers: its judgement on a few of them, and what its table says of all."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "results" / "architectures" / "architectures.json"


@pytest.fixture(scope="module")
def sweep() -> Any:
    spec = importlib.util.spec_from_file_location("architectures", ROOT / "benchmarks" / "architectures.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    "kind, outcome, says",
    [
        ("llama", "right", "windows None"),
        ("gemma2", "right", "windows 12, None"),
        ("mistral", "right", "windows 12"),
        ("jetmoe", "refused", "heads differs"),
        ("diffllama", "refused", "attends 2 times"),
        ("mamba", "refused", "no attention heads"),
    ],
)
def test_a_few_classes(sweep: Any, kind: str, outcome: str, says: str) -> None:
    found = sweep.examine(kind, "")
    assert found["outcome"] == outcome, found
    assert says in found["reason"]


def test_a_wrong_engine_would_be_seen(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is the sweep's own: it does not believe the self-check."""
    from kvgate.engine.attention import Step

    attend = Step.attend

    def broken(step: Step, *given: Any) -> Any:
        return attend(step, *given) * (1.05 if step.parts[0].single else 1.0)

    monkeypatch.setattr("kvgate.engine.self_check.check_once", lambda loaded: None)
    monkeypatch.setattr(Step, "attend", broken)
    assert sweep.examine("llama", "")["outcome"] == "wrong"


@pytest.mark.skipif(not TABLE.exists(), reason="no table was made yet: python benchmarks/architectures.py")
def test_the_committed_table_has_no_wrong_class_and_no_traceback(sweep: Any) -> None:
    table = json.loads(TABLE.read_text())
    counts = Counter(row["outcome"] for row in table["classes"])
    assert set(counts) <= set(sweep.OUTCOMES)
    assert counts["right"] >= 71
    assert (counts["wrong"], counts["traceback"], counts["crashed"]) == (0, 0, 0)
    assert all("\n" not in row["reason"] for row in table["classes"])
    shown = TABLE.with_suffix(".md").read_text()
    assert f"| right | {counts['right']} |" in shown
