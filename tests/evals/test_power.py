"""Items needed, against what can be computed by hand."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.cli import power as power_cli
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.judge.power import Population, gate_power, items_needed
from kvgate.evals.stats.betting import log_e_pass


@given(
    st.floats(-0.3, 0.3),
    st.floats(0.0, 1.0),
    st.integers(1, 6),
    st.floats(0.0, 1.0),
    st.sampled_from([1, 10]),
)
def test_population_has_its_loss_and_discordance(
    loss: float, discordance: float, size: int, dependence: float, levels: int
) -> None:
    population = Population(loss, discordance, size, dependence, levels)
    chances, support = population.probabilities, population.support
    assert chances.sum() == pytest.approx(1.0)
    assert chances.min() >= 0.0
    assert support @ chances == pytest.approx(-loss, abs=1e-9)
    if size == 1:
        assert 1.0 - chances[levels] == pytest.approx(population.differing, abs=1e-9)


def test_dependence_widens_cluster_means() -> None:
    def variance(dependence: float) -> float:
        population = Population(0.0, 0.1, 5, dependence)
        return float(population.support**2 @ population.probabilities)

    assert variance(0.0) == pytest.approx(0.1 / 5)
    assert variance(1.0) == pytest.approx(0.1)
    assert variance(0.0) < variance(0.5) < variance(1.0)


@pytest.mark.parametrize("margin", [0.03, 0.1, 0.25])
def test_identical_answers_need_the_closed_form(margin: float) -> None:
    exact = next(n for n in range(1, 1000) if log_e_pass([0.0] * n, margin) >= math.log(20.0))
    need = items_needed(Population(0.0, 0.0), margin, replicates=10)
    assert (need.fixed, need.sequential, need.mean, need.reached) == (exact, exact, exact, 1.0)


def test_needed_items_are_enough_in_fresh_runs() -> None:
    population = Population(0.0, 0.05)
    need = items_needed(population, 0.1, seed=1)
    assert need.fixed is not None
    assert need.sequential is not None
    assert need.mean < need.sequential <= need.fixed
    drawn = population.counts(np.random.default_rng(2), 2000, 1, need.fixed)[:, 0]
    passed = [log_e_pass(np.repeat(population.support, row), 0.1) >= math.log(20.0) for row in drawn]
    assert np.mean(passed) >= 0.9 - 3 * math.sqrt(0.09 / 2000)


def test_more_of_everything_needs_more_items() -> None:
    base = items_needed(Population(0.0, 0.05), 0.1).fixed
    assert base is not None
    for harder in (
        items_needed(Population(0.0, 0.1), 0.1),
        items_needed(Population(0.0, 0.05), 0.05),
        items_needed(Population(0.0, 0.05), 0.1, power=0.99),
        items_needed(Population(0.0, 0.05, cluster_size=5), 0.1),
    ):
        assert harder.fixed is not None
        assert harder.fixed > base


def test_hopeless_is_none() -> None:
    need = items_needed(Population(0.0, 0.5), 0.01, cap=400, replicates=100)
    assert need.fixed is None
    assert need.sequential is None


def test_gate_power_counts_slices_and_minimums() -> None:
    screen = gate_power(load_gate("screen"), Population(0.0, 0.0), suites=3, slices=3, replicates=10)
    assert screen.items == 30
    few = gate_power(load_gate("production"), Population(0.0, 0.02), suites=3, slices=3, replicates=500)
    many = gate_power(load_gate("production"), Population(0.0, 0.02), suites=3, slices=15, replicates=500)
    assert few.items is not None
    assert many.items is not None
    assert many.items > 1.5 * few.items


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Population(0.0, 1.5), "discordance"),
        (lambda: Population(0.9, 0.1, levels=10), "loss"),
        (lambda: Population(0.0, 0.1, cluster_size=0), "cluster_size"),
        (lambda: items_needed(Population(0.0, 0.1), 0.1, power=1.0), "power"),
        (lambda: gate_power(load_gate("screen"), Population(0.0, 0.1), suites=0, slices=1), "suites"),
    ],
)
def test_nonsense_is_refused(make: object, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make()  # type: ignore[operator]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    power_cli.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["power", "--gate", "screen", "--discordance", "0", "--slices", "3"])
    assert args.run(args) == 0
    assert "items a suite, with 3 suites of 3 slices: 30" in capsys.readouterr().out
    args = parser.parse_args(["power", "--gate", "screen", "--discordance", "0", "--slices", "3", "--json"])
    assert args.run(args) == 0
    assert json.loads(capsys.readouterr().out)["items"] == 30
