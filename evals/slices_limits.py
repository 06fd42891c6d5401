"""How sure a cell of a length-and-depth grid is, from what a leaderboard says about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvgate.evals.statistics_fixed import Interval, clopper_pearson

CONFIDENCE = 0.95


def cluster_shares(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Suite -> clusters for each item, the least over all rows; suites that no row was judged on are missing."""
    shares: dict[str, float] = {}
    for row in rows:
        for entry in row["suites"]:
            share = entry["clusters"] / entry["items"]
            shares[entry["suite"]] = min(share, shares.get(entry["suite"], 1.0))
    return shares


def cell_limits(cell: Mapping[str, Any], shares: Mapping[str, float]) -> Interval:
    """Clopper-Pearson limits, 95 % together, of the mean score in [0, 1] of a grid cell.

    A leaderboard does not say which items of a cell share a context, so every cluster counts as one observation and
    the cell is taken to have its suite's share of them. That is too wide rather than too narrow; so are the limits of
    graded scores, which vary less than right-or-wrong ones of the same mean.
    """
    observations = max(1.0, cell["items"] * shares.get(cell["suite"], 1.0))
    return clopper_pearson(cell["score"] * observations, observations, CONFIDENCE)


def percent(limits: Interval) -> str:
    """ "29–100"."""
    return f"{100 * limits.lower:.0f}–{100 * limits.upper:.0f}"
