"""Which rows are budgets of one policy: what the plan gives tells, never the name of a parameter."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_records import made_cell
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.verdict import decide
from kvgate.evals.leaderboard.finished import load_run

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
GATE = Gate("test", 0.1, 0.2, min_items=30, min_clusters=30, min_slice_clusters=10, slice_by=())


def row(label: str, budget: int, lost: int = 0, **changes: Any) -> list[Any]:
    return [made_cell(i, float(i >= lost), label, budget=budget, **changes) for i in range(60)]


def test_integer_budgets_of_a_policy_with_a_parameter_of_any_name_go_from_large_to_small() -> None:
    exact = [made_cell(i, 1.0) for i in range(60)]
    large = row("mine@256", 256, lost=6, params={"tokens": 256}, settings={})
    small = row("mine@128", 128, params={"tokens": 128}, settings={})
    found = decide(exact + large + small, GATE, repeat_identical=True)
    assert [(each.label, each.status) for each in found] == [
        ("mine@256", "inconclusive"),
        ("mine@128", "inconclusive"),
    ]
    assert "not tested: mine@256" in found[1].reasons[0]


def test_a_window_that_is_no_budget_is_a_parameter() -> None:
    exact = [made_cell(i, 1.0) for i in range(60)]
    wide = row("mine(window=64)@256", 256, lost=40, settings={"window": 64})
    narrow = row("mine(window=8)@128", 128, settings={"window": 8})
    found = decide(exact + wide + narrow, GATE, repeat_identical=True)
    assert {each.label: each.status for each in found} == {
        "mine(window=64)@256": "block",
        "mine(window=8)@128": "enable",
    }
    assert len({each.family for each in found}) == 2


def test_one_label_stands_for_one_policy_and_one_ratio() -> None:
    exact = [made_cell(i, 1.0) for i in range(60)]
    mixed = [*row("mine@0.5", 256, settings={})[:30], *row("mine@0.5", 256, settings={"window": 8})[30:]]
    (found,) = decide(exact + mixed, GATE, repeat_identical=True)
    assert "2 different policies" in found.reasons[0]
    ratios = [*row("mine@0.5", 256, ratio=0.5)[:30], *row("mine@0.5", 256, ratio=0.25)[30:]]
    (found,) = decide(exact + ratios, GATE, repeat_identical=True)
    assert "2 different ratios" in found.reasons[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, kind, name", [("newest_and_first", "Newest", "newest"), ("large_values", "LargeValues", "large_values")]
)
def test_the_examples_of_contributing_run_over_two_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, kind: str, name: str
) -> None:
    (block,) = re.findall(rf"```python\n(# mine/{file}.py.*?)```", CONTRIBUTING.read_text(), re.S)
    (tmp_path / "mine_example.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    plan = {
        "name": "example", "model": str(save_tiny_model(tmp_path / "model", seed=3)), "dtype": "float32",
        "suites": [{"name": "fidelity", "counts": {600: 2, 700: 2}, "tasks": ["continue"],
                    "options": {"new_tokens": 4}}],
        "policies": [{"policy": f"mine_example:{kind}", "budgets": [0.5, 0.25, 300]}],
    }  # fmt: skip
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "run"), "--json"]) == 0
    rows = load_run(tmp_path / "run").leaderboard()["rows"]
    assert [each["label"] for each in rows] == [f"{name}@0.5", f"{name}@300", f"{name}@0.25"]
    assert {each["family"] for each in rows} == {f"{name}() question_unseen"}
    assert "invalid" not in {each["status"] for each in rows}
    sys.modules.pop("mine_example", None)
