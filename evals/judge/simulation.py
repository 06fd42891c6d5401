"""``kvgate prove``: the error rates of the gate, measured on simulated policies whose true loss is known.

Every case simulates the paired differences of one suite and looks after every batch, the worst a user can do. False
enables are counted whether or not the run had been blocked before, and false blocks likewise. Beside the e-process
stands a one-sided t-test on the same data and the same looks, as a warning: it enables what it should not.

A row case simulates a whole row of suites and slices and hands it to the code and the gate file that judge a run; see
``simulated_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvgate.evals.judge.power import Population
from kvgate.evals.stats.betting import log_e_counts
from kvgate.evals.stats.intervals import clopper_pearson

Truth = Literal["at margin", "above margin", "zero loss"]
Kind = Literal["binary", "graded"]

MARGINS = (0.02, 0.03, 0.05, 0.10)
DISCORDANCES = (0.02, 0.05, 0.10, 0.20)
CLUSTER_SIZES = (1, 5)
ABOVE = 1.25  # times the margin: near enough to be hard, far enough to be wrong
_LEVELS: dict[Kind, int] = {"binary": 1, "graded": 10}
_CHUNK = 250
_T_FROM_ITEMS = 40


@dataclass(frozen=True)
class Settings:
    """How long and how often: ``cap`` items at most, one look every ``batch`` items."""

    replicates: int = 2000
    alpha: float = 0.05
    batch: int = 20
    cap: int = 4000
    seed: int = 20261129

    def __post_init__(self) -> None:
        for name in ("replicates", "batch", "cap"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")


@dataclass(frozen=True)
class Case:
    """A simulated policy; its loss follows from margin and truth."""

    margin: float
    discordance: float
    cluster_size: int
    kind: Kind
    truth: Truth

    @property
    def population(self) -> Population:
        """Differences with the true loss."""
        factor = {"at margin": 1.0, "above margin": ABOVE, "zero loss": 0.0}[self.truth]
        return Population(
            self.margin * factor, self.discordance, cluster_size=self.cluster_size, levels=_LEVELS[self.kind]
        )


@dataclass(frozen=True)
class CaseResult:
    """Rates over replicates, each with its upper 95 % limit (Clopper-Pearson, one-sided) as Monte-Carlo error.

    ``enabled`` is an error at and above the margin and the power at zero loss; ``blocked`` is an error at the margin
    and at zero loss. ``mean_items``: items until enabled, blocked or the cap. ``t_enabled``: the t-test's rate.
    """

    case: Case
    loss: float
    differing: float
    enabled: float
    enabled_upper: float
    blocked: float
    blocked_upper: float
    mean_items: float
    t_enabled: float

    @property
    def false_enable(self) -> float | None:
        """The rate of false enables; None where enabling is right."""
        return None if self.case.truth == "zero loss" else self.enabled

    @property
    def false_block(self) -> float | None:
        """The rate of false blocks; None where blocking is right."""
        return None if self.case.truth == "above margin" else self.blocked


def cases() -> list[Case]:
    """Every combination that ``kvgate prove`` runs."""
    kinds: tuple[Kind, ...] = ("binary", "graded")
    truths: tuple[Truth, ...] = ("at margin", "above margin", "zero loss")
    return [Case(*parts) for parts in product(MARGINS, DISCORDANCES, CLUSTER_SIZES, kinds, truths)]


def run_case(case: Case, settings: Settings, stream: int) -> CaseResult:
    """Simulate one case. ``stream`` tells its random numbers from those of other cases with the same seed."""
    population = case.population
    clusters = max(1, settings.batch // case.cluster_size)
    step = clusters * case.cluster_size
    batches = max(1, settings.cap // step)
    rng = np.random.default_rng([settings.seed, stream])
    wanted = math.log(1.0 / settings.alpha)
    parts = []
    for size in _chunks(settings.replicates):
        counts = population.counts(rng, size, batches, clusters)
        passed = log_e_counts(population.support, counts, -case.margin) >= wanted
        failed = log_e_counts(population.support[::-1], counts, case.margin) >= wanted
        naive = _t_test(population.support, counts, case.margin, settings.alpha)
        naive[:, : max(0, math.ceil(_T_FROM_ITEMS / step) - 1)] = False
        stopped = passed | failed
        first = np.where(stopped.any(axis=1), stopped.argmax(axis=1) + 1, batches) * step
        parts.append([passed.any(axis=1), failed.any(axis=1), naive.any(axis=1), first])
    enabled, blocked, naive_enabled, items = (np.concatenate(column) for column in zip(*parts, strict=True))
    return CaseResult(
        case=case,
        loss=population.loss,
        differing=population.differing,
        enabled=float(enabled.mean()),
        enabled_upper=_upper(enabled),
        blocked=float(blocked.mean()),
        blocked_upper=_upper(blocked),
        mean_items=float(items.mean()),
        t_enabled=float(naive_enabled.mean()),
    )


def _chunks(total: int) -> Iterator[int]:
    for start in range(0, total, _CHUNK):
        yield min(_CHUNK, total - start)


def _upper(hits: NDArray[np.bool_]) -> float:
    return clopper_pearson(float(hits.sum()), float(hits.size), 0.90).upper


def _t_test(support: NDArray[np.float64], counts: NDArray[np.int32], margin: float, alpha: float) -> NDArray[np.bool_]:
    """Whether a one-sided t-test on cluster means calls the policy non-inferior, ``[replicates, batches]``."""
    n = counts.sum(axis=-1).astype(np.float64)
    mean = counts @ support / n
    variance = np.maximum(counts @ support**2 / n - mean**2, 0.0) * n / np.maximum(n - 1.0, 1.0)
    limit = special.stdtrit(np.maximum(n - 1.0, 1.0), 1.0 - alpha) * np.sqrt(variance / n)
    return np.asarray(mean - limit > -margin)
