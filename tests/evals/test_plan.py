"""``kvgate plan``: shows what would run, and the items its gate needs."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.cli import main
from kvgate.evals.config import load_plan
from kvgate.evals.gates import load_gate
from kvgate.evals.suites.catalog import suite_class


def test_a_plan_is_shown_without_its_model(capsys: Any) -> None:
    assert main(["plan", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "retrieval        about 44 items" in shown
    assert "11 rows an item" in shown


def test_power_tells_a_quick_plan_from_one_that_can_pass_production(capsys: Any) -> None:
    assert main(["plan", "full", "--power", "--discordance", "0.02"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    needed = int(last.rsplit(" ", 1)[1])
    assert "4 suites of 9 slices" in last
    assert 250 < needed <= 1300


def test_the_quick_plan_can_pass_its_gate() -> None:
    config = load_plan("quick")
    gate = load_gate(config.gate)
    for choice in config.suites:
        tasks = suite_class(choice.name)().chosen(choice.tasks)
        assert sum(choice.counts.values()) * len(tasks) >= max(40, gate.min_items)
        assert min(choice.counts.values()) * len(tasks) >= gate.min_slice_clusters, "a slice too small to be judged"


@pytest.mark.parametrize("bad", [["plan", "nope"], ["plan", "--gate", "nope"], ["plan", "--power", "1.5"]])
def test_bad_input(bad: list[str], capsys: Any) -> None:
    assert main(bad) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
