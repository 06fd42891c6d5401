"""``kvgate plan``: shows what would run, and the items its gate needs."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.cli import main


def test_a_plan_is_shown_without_its_model(capsys: Any) -> None:
    assert main(["plan", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "retrieval        about 44 items" in shown
    assert "13 rows an item" in shown


def test_power_tells_a_quick_plan_from_one_that_can_pass_production(capsys: Any) -> None:
    assert main(["plan", "full", "--power", "--discordance", "0.02"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    needed = int(last.rsplit(" ", 1)[1])
    assert "3 suites of 9 slices" in last
    assert 250 < needed <= 1300


@pytest.mark.parametrize("bad", [["plan", "nope"], ["plan", "--gate", "nope"], ["plan", "--power", "1.5"]])
def test_bad_input(bad: list[str], capsys: Any) -> None:
    assert main(bad) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
