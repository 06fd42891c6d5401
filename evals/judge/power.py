"""How many items a gate needs: by simulation of the very e-process that will judge them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.judge.gates import Gate
from kvgate.evals.stats.betting import log_e_counts

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """Paired differences of a policy with a known true loss.

    Attributes:
        loss: true mean loss, exact minus policy; negative for a gain.
        discordance: share of items whose score differs at all; raised to what the loss needs (:attr:`differing`).
        cluster_size: items of a cluster; with probability ``dependence`` they all share one outcome, else none do.
        levels: 1 for right-or-wrong scores, where a differing item differs by 1; 10 for graded ones, where it differs
            by .1, .2, ... 1 with equal probability.
    """

    loss: float
    discordance: float
    cluster_size: int = 1
    dependence: float = 0.5
    levels: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.discordance <= 1.0:
            raise ValueError(f"discordance is {self.discordance}; give a share of items between 0 and 1")
        if not abs(self.loss) <= self._largest_step:
            raise ValueError(f"loss is {self.loss}; give a mean loss within {self._largest_step:g} of 0")
        if self.cluster_size < 1 or not 0.0 <= self.dependence <= 1.0:
            raise ValueError(
                f"cluster_size is {self.cluster_size}, dependence {self.dependence}; give at least 1, and a share"
            )

    @property
    def _largest_step(self) -> float:
        return (self.levels + 1) / (2 * self.levels)

    @property
    def differing(self) -> float:
        """Share of items that differ: the discordance, or the least with which the loss is possible."""
        return max(self.discordance, abs(self.loss) / self._largest_step)

    @cached_property
    def support(self) -> Floats:
        """Possible cluster means, ascending, ``[2 * levels * cluster_size + 1]``."""
        top = self.levels * self.cluster_size
        return np.asarray(np.arange(-top, top + 1) / top)

    @cached_property
    def probabilities(self) -> Floats:
        """Chance of each cluster mean in :attr:`support`."""
        gap = self.loss / self._largest_step
        worse, better = (self.differing + gap) / 2.0, (self.differing - gap) / 2.0
        item = np.zeros(2 * self.levels + 1)
        item[: self.levels], item[self.levels], item[self.levels + 1 :] = (
            worse / self.levels,
            1.0 - self.differing,
            better / self.levels,
        )
        together = np.zeros(self.support.size)
        together[:: self.cluster_size] = item
        apart = np.ones(1)
        for _ in range(self.cluster_size):
            apart = np.convolve(apart, item)
        mixed = self.dependence * together + (1.0 - self.dependence) * apart
        positive = np.clip(mixed, 0.0, None)
        return np.asarray(positive / positive.sum())

    def counts(self, rng: np.random.Generator, replicates: int, batches: int, clusters: int) -> NDArray[np.int32]:
        """Cumulated counts of each cluster mean after each batch, int32 ``[replicates, batches, values]``."""
        drawn = rng.multinomial(clusters, self.probabilities, size=(replicates, batches))
        return np.cumsum(drawn, axis=1, dtype=np.int32)


@dataclass(frozen=True)
class Need:
    """Items for one test.

    Attributes:
        fixed: items with which a run of fixed size passes with the wanted power; None if the cap is too small.
        sequential: items by which that share of runs has stopped; ``mean``: items a run takes on average, runs that
            reach the cap counted with it.
        reached: share of runs that stopped by the cap.
    """

    margin: float
    fixed: int | None
    sequential: int | None
    mean: float
    reached: float


@dataclass(frozen=True)
class GatePower:
    """Items a gate needs in each suite; ``items`` is None where the cap was too small for one of the tests."""

    suite: Need
    slice: Need | None
    items: int | None


def items_needed(
    population: Population,
    margin: float,
    *,
    alpha: float = 0.05,
    power: float = 0.9,
    cap: int = 20_000,
    replicates: int = 2000,
    seed: int = 0,
) -> Need:
    """Items until ``population`` is shown to lose less than ``margin``, looked at every hundredth of the way or so.

    Tries caps of 400, 1600, 6400 ... items up to ``cap`` and stops at the first within which a run of fixed size would
    have the wanted power. ValueError for a power that makes no sense.
    """
    if not 0.5 <= power < 1.0:
        raise ValueError(f"power is {power}; give a chance of success of at least 0.5 and below 1, usually 0.9")
    tried = min(cap, 400 * population.cluster_size)
    while True:
        need = _simulate(population, margin, math.log(1.0 / alpha), power, tried, replicates, seed)
        if need.fixed is not None or tried == cap:
            return need
        tried = min(cap, 4 * tried)


def _simulate(
    population: Population, margin: float, wanted: float, power: float, cap: int, replicates: int, seed: int
) -> Need:
    clusters = max(1, round(cap / population.cluster_size / 400))
    step = clusters * population.cluster_size
    batches = max(1, cap // step)
    counts = population.counts(np.random.default_rng(seed), replicates, batches, clusters)
    passed = log_e_counts(population.support, counts, -margin) >= wanted
    first = np.where(passed.any(axis=1), passed.argmax(axis=1) + 1, batches) * step
    reached = float(passed.any(axis=1).mean())
    # The last batch below the wanted power counts, not the first above it: a lucky batch is no plan.
    below = np.flatnonzero(passed.mean(axis=0) < power)
    fixed = int(below[-1] + 2) if below.size else 1
    return Need(
        margin=margin,
        fixed=fixed * step if fixed <= batches else None,
        sequential=int(np.quantile(first, power, method="higher")) if reached >= power else None,
        mean=float(first.mean()),
        reached=reached,
    )


def gate_power(
    gate: Gate,
    population: Population,
    *,
    suites: int,
    slices: int,
    finest: int | None = None,
    families: int = 1,
    power: float = 0.9,
    cap: int = 20_000,
    replicates: int = 2000,
    seed: int = 0,
) -> GatePower:
    """Items a suite needs so that all ``suites`` and their ``slices`` (of each suite) pass together.

    Every test must succeed, so each gets its share of the allowed failures (Bonferroni): ``1 - (1 - power) / tests``.
    ``slices`` is ignored for a gate that does not tell slices apart; ``finest`` of them (all of them if None) share no
    items, which decides how many items a suite needs. ``families`` of policies share the gate's alpha.
    """
    if suites < 1 or slices < 1 or families < 1:
        raise ValueError(f"suites is {suites}, slices {slices}, families {families}; give at least 1 of each")
    judged = slices if gate.groupings else 0
    apart = min(judged, finest or judged)
    each = 1.0 - (1.0 - power) / (suites * (1 + judged))

    def need(margin: float, stream: int) -> Need:
        return items_needed(
            population,
            margin,
            alpha=gate.alpha / families,
            power=each,
            cap=cap,
            replicates=replicates,
            seed=seed + stream,
        )

    whole = need(gate.m_suite, 0)
    part = need(gate.m_slice, 1) if judged else None
    tests = [whole.fixed] + ([None if part.fixed is None else part.fixed * apart] if part else [])
    enough = [items for items in tests if items is not None]
    floors = [
        gate.min_items,
        gate.min_clusters * population.cluster_size,
        gate.min_slice_clusters * population.cluster_size * apart,
    ]
    return GatePower(whole, part, max(*enough, *floors) if len(enough) == len(tests) else None)
