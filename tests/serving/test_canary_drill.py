"""The drill: three bad policies are rolled back before many requests saw them, a good one is promoted."""

from __future__ import annotations

import pytest

from kvgate.serving.canary.simulate import AT_THE_MARGIN, DRILL, drill, leaves_shadow, rolled_back

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
def test_a_few_replicates_at_the_margin(name: str) -> None:
    """The thousand are in the record; of twelve, more than three would be no accident at .05 (chance .002)."""
    loss = AT_THE_MARGIN[name]
    assert sum(leaves_shadow(loss, seed, 500) for seed in range(12)) <= 3
    assert sum(rolled_back(loss, seed, 500) for seed in range(12)) <= 3
