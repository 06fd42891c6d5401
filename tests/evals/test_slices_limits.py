"""Limits of the cells of a length-and-depth grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import report_sample as sample

from kvgate.evals.figures_heat import heat_maps
from kvgate.evals.slices_limits import cell_limits, cluster_shares, percent


def cell(score: float, items: int, suite: str = "s") -> dict[str, Any]:
    return {"suite": suite, "score": score, "items": items}


@pytest.mark.parametrize("items, text", [(2, "16–100"), (3, "29–100"), (30, "88–100")])
def test_all_right_is_never_certain(items: int, text: str) -> None:
    """Clopper & Pearson: the lower limit is .025 to the power of 1/n."""
    limits = cell_limits(cell(1.0, items), {})
    assert limits.lower == pytest.approx(0.025 ** (1 / items))
    assert percent(limits) == text


def test_items_of_one_context_count_once() -> None:
    def row(items: int, clusters: int) -> dict[str, Any]:
        return {"suites": [{"suite": "s", "items": items, "clusters": clusters}]}

    shares = cluster_shares([row(24, 24), row(24, 12), {"suites": []}])
    assert shares == {"s": 0.5}
    assert cell_limits(cell(0.5, 8), shares) == cell_limits(cell(0.5, 4), {})
    assert cell_limits(cell(1.0, 1), shares) == cell_limits(cell(1.0, 1), {})  # never less than one observation
    assert cell_limits(cell(0.5, 8, "other"), shares) == cell_limits(cell(0.5, 8), {})


def test_the_heat_map_draws_them_across_each_cell_and_says_so() -> None:
    figure = heat_maps(sample.run_of(sample.records()).leaderboard())["heat-question_unseen-retrieval"]
    full = figure.axes[0]
    assert full.get_title() == "full KV"
    assert len(full.lines) == len(full.texts) == 6  # two lengths, three depths
    left, right = np.asarray(full.lines[0].get_xdata(), dtype=float)
    assert (right - left) / 0.84 == pytest.approx(1.0 - 0.025**0.25)  # four of four items right
    assert -0.5 < left < right < 0.5
    assert full.get_xlim() == (-0.5, 1.5)
    assert "items in each cell: 4; line: 95 % interval" in figure.get_supxlabel()
