"""Limits of the cells of a length-and-depth grid."""

from __future__ import annotations

import numpy as np
import pytest
import report_sample as sample
from made_records import made_cell

from kvgate.evals.judge.gates import Gate
from kvgate.evals.leaderboard.limits import cell_limits, percent
from kvgate.evals.leaderboard.slices import grid
from kvgate.evals.report.heat_maps import heat_maps


@pytest.mark.parametrize("clusters, text", [(2, "16–100"), (3, "29–100"), (30, "88–100")])
def test_all_right_is_never_certain(clusters: int, text: str) -> None:
    """Clopper & Pearson: the lower limit is .025 to the power of 1/n."""
    limits = cell_limits({"score": 1.0, "items": 60, "clusters": clusters})
    assert limits.lower == pytest.approx(0.025 ** (1 / clusters))
    assert percent(limits) == text


def test_a_grid_counts_items_of_one_context_once() -> None:
    records = [made_cell(index, 1.0, cluster=f"c{index // 4}", length=512) for index in range(12)]
    records += [made_cell(index, 1.0, length=1024) for index in range(12, 17)]
    short, long = grid(records, Gate("test", 0.1, 0.3))
    assert (short["items"], short["clusters"]) == (12, 3)
    assert (long["items"], long["clusters"]) == (5, 5)
    assert percent(cell_limits(short)) == "29–100"


def test_a_board_that_counted_no_clusters_is_not_trusted_with_more_than_one() -> None:
    assert cell_limits({"score": 1.0, "items": 40}) == cell_limits({"score": 1.0, "items": 40, "clusters": 1})


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
