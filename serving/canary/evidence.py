"""E-processes over closed conversations, updated one by one: the gate's betting test (kvgate.evals.stats.betting).

To pass, a policy needs the wealth of one process over all conversations so far. To block it, the wealth is a mixture of
processes that began at fixed counts of conversations: one that breaks late is not carried by its good start. A process
that has not begun has wealth 1, so the mixture with weights that sum to 1 is an e-process, and may be looked at any
time (Ville 1939).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.stats.betting import FRACTIONS, confidence_bounds

STARTS = (0, 64, 128, 256, 512, 1024, 2048)
START_LOGS = np.log([0.5, *[0.5 / (len(STARTS) - 1)] * (len(STARTS) - 1)])
_BETS = np.asarray(FRACTIONS)


@dataclass
class Stream:
    """Differences of one measure, policy minus exact where more is better, one a conversation, against a margin.

    Attributes:
        margin: accepted loss of the mean. count, total: conversations so far and the sum of their differences.
        counts: how often each difference came.
    """

    margin: float
    count: int = 0
    total: float = 0.0
    _pass: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FRACTIONS)))
    _block: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(STARTS), len(FRACTIONS))))
    counts: dict[float, int] = field(default_factory=dict)
    _steps: dict[float, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=dict)
    _log_block: float | None = None
    _bounds: tuple[int, float, tuple[float, float]] | None = None

    def add(self, difference: float) -> None:
        """One conversation, in [-1, 1]."""
        if not -1.0 <= difference <= 1.0:
            raise ValueError(f"difference {difference}: must lie in [-1, 1]")
        if difference not in self._steps:
            if len(self._steps) > 4096:
                self._steps.clear()
            self._steps[difference] = self._bets(difference, -self.margin), self._bets(-difference, self.margin)
        up, down = self._steps[difference]
        self._pass += up
        begun = sum(start <= self.count for start in STARTS)
        self._block[:begun] += down
        self.count += 1
        self.total += difference
        self.counts[difference] = self.counts.get(difference, 0) + 1
        self._log_block = None

    @property
    def mean(self) -> float:
        """Mean difference; 0 without data."""
        return self.total / self.count if self.count else 0.0

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Lower and upper limit of the mean, each wrong at any time with probability at most ``alpha``."""
        if self._bounds is None or self._bounds[:2] != (self.count, alpha):
            count, seen = self.count, dict(self.counts)  # the controller's thread goes on
            self._bounds = count, alpha, confidence_bounds(np.repeat(list(seen), list(seen.values())), alpha)
        return self._bounds[2]

    @property
    def log_pass(self) -> float:
        """Log e-value against "the mean is at most -margin"."""
        return _log_mean(self._pass)

    @property
    def log_block(self) -> float:
        """Log e-value against "the mean is at least -margin"."""
        if self._log_block is None:
            per_start = np.logaddexp.reduce(self._block, axis=1) - math.log(len(FRACTIONS))
            self._log_block = float(np.logaddexp.reduce(per_start + START_LOGS))
        return self._log_block

    def _bets(self, value: float, mu: float) -> NDArray[np.float64]:
        # The bet f / (1 + mu) keeps every factor at 1 - f or more.
        return np.log1p(_BETS * (value - mu) / (1.0 + mu))


def combined_block(streams: Mapping[str, Stream], weights: Mapping[str, float]) -> float:
    """Log of the weighted mean of the streams' block e-values, an e-value under any dependence (Vovk & Wang 2021)."""
    logs = [streams[name].log_block + math.log(weight) for name, weight in weights.items()]
    return float(np.logaddexp.reduce(logs))


def _log_mean(logs: NDArray[np.float64]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))
