"""The demand forecast kept up to date cheaply: one row per running request, rebuilt every few rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle import forecast
from kvgate.lifecycle.footprint import Footprint
from kvgate.lifecycle.forecast import Demand, Floats, Group, Singles


class DemandForecast:
    """Expected blocks of each running request on a grid of rounds ahead.

    A row is a few rounds old at most (``refresh_rounds``); by then its request is that many tokens longer, which is far
    below what the forecast can tell. Starting a request adds its row; ending one needs nothing, since sums name slots.

    Args:
        points: of the grid. footprint: blocks that tokens take. refresh_rounds: age at which all rows are rebuilt.
        variance: whether variances are needed (planning with more than the mean).
    """

    def __init__(self, points: int, footprint: Footprint, refresh_rounds: int, *, variance: bool) -> None:
        self._points = points
        self._footprint = footprint
        self._refresh = refresh_rounds
        self._with_variance = variance
        self._mean: Singles = np.zeros((0, points), np.float32)
        self._variance: Singles = np.zeros((0, points), np.float32)
        self._at: Floats = np.zeros(points)
        self._made = -1

    def stale(self, round_: int, horizon: int) -> bool:
        """Whether all rows must be rebuilt: too old, or the grid does not reach ``horizon`` rounds."""
        return self._made < 0 or round_ - self._made >= self._refresh or self._at[-1] < horizon

    def rebuild(self, round_: int, horizon: int, slots: NDArray[np.int64], group: Group, survival: Floats) -> None:
        """Rows of all running ``slots``."""
        self._at = forecast.grid(horizon, self._points)
        self._made = round_
        self.add(slots, group, survival)

    def add(self, slots: NDArray[np.int64], group: Group, survival: Floats) -> None:
        """Rows of requests that just started."""
        top = int(slots.max(initial=-1)) + 1
        if top > len(self._mean):
            more = ((0, max(top, 2 * len(self._mean)) - len(self._mean)), (0, 0))
            self._mean, self._variance = np.pad(self._mean, more), np.pad(self._variance, more)
        chance, blocks = forecast.expectation(group, survival, self._at, self._footprint)
        mean = chance * blocks
        self._mean[slots] = mean
        if self._with_variance:
            self._variance[slots] = mean * blocks * (1.0 - chance)

    def of(self, group: Group, survival: Floats) -> Demand:
        """The demand of requests that do not run yet."""
        chance, blocks = forecast.expectation(group, survival, self._at, self._footprint)
        mean = chance * blocks
        variance = mean * blocks * (1.0 - chance) if self._with_variance else np.zeros((1, self._points))
        return Demand(mean.sum(0, dtype=np.float64), variance.sum(0, dtype=np.float64))

    def total(self, slots: NDArray[np.int64]) -> Demand:
        """The demand of running requests."""
        variance = self._variance[slots].sum(0, dtype=np.float64) if self._with_variance else np.zeros(self._points)
        return Demand(self._mean[slots].sum(0, dtype=np.float64), variance)
