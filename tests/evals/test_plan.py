"""``kvgate plan``: shows what would run, and the items its gate needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvgate import strict_yaml
from kvgate.cli.main import main
from kvgate.evals.judge.gates import load_gate, parse_gate
from kvgate.evals.plan.config import load_plan
from kvgate.evals.suites.catalog import suite_class


def test_a_plan_is_shown_without_its_model(capsys: Any) -> None:
    assert main(["plan", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "retrieval        about 40 items" in shown
    assert "27 rows an item" in shown


def test_the_full_plan_can_pass_production(capsys: Any) -> None:
    assert main(["plan", "full", "--power", "--discordance", "0.02"]) == 0
    *_, last, retrieval, code, multi_turn, long_answers = capsys.readouterr().out.strip().splitlines()
    assert "4 suites of 21 slices" in last
    assert 250 < int(last.rsplit(" ", 1)[1]) <= 3000
    for line in (retrieval, code, multi_turn, long_answers):
        assert line.endswith("enough"), line


def test_items_without_a_depth_are_slices_of_their_own(capsys: Any) -> None:
    assert main(["plan", "full"]) == 0
    shown = capsys.readouterr().out
    assert "retrieval        about 2400 items, 9 (length, depth) slices of 266 or more" in shown
    assert "long_generation  about 1240 items, 4 (length, depth) slices of 310 or more" in shown


def test_a_slice_too_small_is_told_though_the_suite_is_large_enough(capsys: Any, tmp_path: Any) -> None:
    plan = tmp_path / "thin.yaml"
    plan.write_text(
        "model: embedded\ngate: production\npolicies: [h2o]\n"
        "suites: [{name: long_generation, counts: {512: 315, 1024: 315}, depths: [0.1, 0.5, 0.9]}]\n"
    )
    assert main(["plan", str(plan), "--power", "--discordance", "0.02"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "1260 of" in last
    assert "105 of" in last
    assert last.endswith("in its smallest slice: too few")


def test_the_plan_of_long_answers_has_the_items_its_gate_asks_for(capsys: Any) -> None:
    assert main(["plan", "long", "--power", "--discordance", "0.02"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].endswith("enough")


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


@pytest.mark.parametrize(
    "reader, text",
    [
        (lambda text: parse_gate(text, "mine"), "m_suite: 0.02\nm_slice: 0.05\nm_suite: 0.5\n"),
        (lambda text: strict_yaml.load(text), "suites:\n  - {name: code, counts: {512: 3, 512: 40}}\n"),
    ],
)
def test_a_key_that_stands_twice_is_refused(reader: Any, text: str) -> None:
    with pytest.raises((ValueError, yaml.YAMLError), match=r"key .* stands twice"):
        reader(text)


def test_a_plan_whose_key_stands_twice_ends_in_one_line(tmp_path: Path, capsys: Any) -> None:
    plan = tmp_path / "mine.yaml"
    plan.write_text("model: embedded\ngate: production\nsuites: [{name: code}]\npolicies: [{use: h2o}]\ngate: screen\n")
    assert main(["plan", str(plan)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "key 'gate' stands twice" in line
