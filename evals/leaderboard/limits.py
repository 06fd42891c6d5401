"""How sure a cell of a length-and-depth grid is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgate.evals.stats.intervals import Interval, clopper_pearson

CONFIDENCE = 0.95


def cell_limits(cell: Mapping[str, Any]) -> Interval:
    """Clopper-Pearson limits, 95 % together, of the mean score in [0, 1] of a grid cell.

    Every cluster counts as one observation, which is too wide rather than too narrow for clusters of several items;
    so are the limits of graded scores, which vary less than right-or-wrong ones of the same mean.
    """
    observations = cell.get("clusters", 1)  # boards of before they were counted: as if all shared one context
    return clopper_pearson(cell["score"] * observations, observations, CONFIDENCE)


def percent(limits: Interval) -> str:
    """ "29–100"."""
    return f"{100 * limits.lower:.0f}–{100 * limits.upper:.0f}"
