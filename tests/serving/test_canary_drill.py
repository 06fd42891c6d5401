"""The drill: three bad policies are rolled back before many requests saw them, a good one is promoted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvgate.serving.canary.evidence import Stream
from kvgate.serving.canary.simulate import (
    AT_THE_MARGIN,
    DRILL,
    AtTheMargin,
    drill,
    leaves_shadow,
    path_block,
    path_pass,
    rolled_back,
)

RECORD = Path(__file__).resolve().parents[2] / "results" / "serving" / "drill.json"

# policy -> measure that gives it away, and requests that may be answered under it before it goes
BAD = {
    "loses only long conversations": ("quality:long", 50),
    "preempts others by growing": ("preemptions", 400),
    "breaks after 500 requests": ("quality", 800),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_policies_are_rolled_back(name: str) -> None:
    found = drill(DRILL[name], seed=11)
    measure, most = BAD[name]
    assert found.state == "rolled_back"
    assert found.why.startswith(measure)
    assert found.exposed <= most


@pytest.mark.slow
def test_a_good_policy_is_promoted() -> None:
    found = drill(DRILL["good"], seed=11)
    assert found.state == "full"


@pytest.mark.parametrize("name", AT_THE_MARGIN)
def test_the_thousand_replicates_are_the_controller_s_own(name: str) -> None:
    """The record's error rates come from formulas over whole replicates: each decision is that of the controller."""
    decisions = set()
    for margin_of in (
        AT_THE_MARGIN[name],
        lambda random, n: AT_THE_MARGIN[name](random, n) - 0.2 * (random.random(n) < 0.4),
    ):
        for seed in range(4):
            drawn = AtTheMargin.draw(
                lambda random, n, f=margin_of: np.clip(f(random, n), -1.0, 1.0).round(3), seed, 500
            )
            found = drawn.leaves_shadow(), drawn.rolled_back()
            assert found == (leaves_shadow(drawn), rolled_back(drawn))
            decisions.add(found)
    assert len(decisions) > 1, "or nothing was decided"


def test_paths_are_those_of_streams() -> None:
    values = np.random.default_rng(2).choice([-1.0, -0.3, 0.0, 0.5], 150)
    stream = Stream(0.05)
    ups, downs = path_pass(values, 0.05), path_block(values, 0.05)
    for value, up, down in zip(values.tolist(), ups.tolist(), downs.tolist(), strict=True):
        stream.add(value)
        assert (stream.log_pass, stream.log_block) == pytest.approx((up, down), abs=1e-9)


def test_the_record_keeps_its_error_rates() -> None:
    figures = json.loads(RECORD.read_text())
    assert figures["replicates"] >= 1000
    for found in figures["at_the_margin"].values():
        assert found["false_promotion"] <= 0.05
        assert found["false_rollback"] <= 0.05
    assert set(figures["drill"]["good"]["ends"]) == {"full"}
    for name, (_, most) in BAD.items():
        assert set(figures["drill"][name]["ends"]) == {"rolled_back"}
        assert figures["drill"][name]["exposed_median"] <= most
