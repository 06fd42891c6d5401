"""Simulated rows of several suites and slices, judged by the rules that join them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.judge.power import Population
from kvgate.evals.judge.simulation import Settings
from kvgate.evals.stats.betting import log_e_counts
from kvgate.evals.stats.intervals import clopper_pearson

M_SUITE, M_SLICE = 0.03, 0.10  # those of the production gate
SUITES, SLICES = 3, 4
DISCORDANCE = 0.05
_BATCH_OF_SLICE = 10
_CHUNK = 250


@dataclass(frozen=True)
class RowCase:
    """True loss of every slice, ``losses[suite][slice]``, and which outcome is wrong."""

    name: str
    losses: tuple[tuple[float, ...], ...]
    enable_is_error: bool
    block_is_error: bool


@dataclass(frozen=True)
class RowResult:
    """Rates over replicates with upper 95 % limits; ``mean_items``: items of a suite until decided or the cap."""

    name: str
    enable_is_error: bool
    block_is_error: bool
    enabled: float
    enabled_upper: float
    blocked: float
    blocked_upper: float
    mean_items: float


def row_cases() -> list[RowCase]:
    """What a sceptic would try on a row."""
    calm = (0.0,) * SLICES
    at_suite = (M_SUITE,) * SLICES
    others = (calm,) * (SUITES - 1)
    gain = 0.3 / (SLICES - 1)
    return [
        RowCase("lossless", (calm, *others), False, True),
        RowCase("one suite at its margin", (at_suite, *others), True, True),
        RowCase("every suite at its margin", (at_suite,) * SUITES, True, True),
        RowCase("one slice at its margin", ((M_SLICE, 0.0, 0.0, 0.0), *others), True, True),
        RowCase("right on average, one slice loses .3", ((0.3, -gain, -gain, -gain), *others), True, False),
    ]


def run_row(case: RowCase, settings: Settings, stream: int) -> RowResult:
    """Simulate one row, with a look after every batch."""
    rng = np.random.default_rng([settings.seed, 10_000 + stream])
    step = _BATCH_OF_SLICE * SLICES
    batches = max(1, settings.cap // step)
    parts = []
    for start in range(0, settings.replicates, _CHUNK):
        size = min(_CHUNK, settings.replicates - start)
        passed, failed = _look(case, rng, size, batches, settings.alpha)
        stopped = passed | failed
        first = np.where(stopped.any(axis=1), stopped.argmax(axis=1) + 1, batches) * step
        parts.append([passed.any(axis=1), failed.any(axis=1), first])
    enabled, blocked, items = (np.concatenate(column) for column in zip(*parts, strict=True))
    total = float(settings.replicates)
    return RowResult(
        name=case.name,
        enable_is_error=case.enable_is_error,
        block_is_error=case.block_is_error,
        enabled=float(enabled.mean()),
        enabled_upper=clopper_pearson(float(enabled.sum()), total, 0.90).upper,
        blocked=float(blocked.mean()),
        blocked_upper=clopper_pearson(float(blocked.sum()), total, 0.90).upper,
        mean_items=float(items.mean()),
    )


def _look(
    case: RowCase, rng: np.random.Generator, size: int, batches: int, alpha: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the row passes and whether it is blocked at each look, both ``[replicates, batches]``."""
    wanted = math.log(1.0 / alpha)
    passed = np.ones((size, batches), dtype=np.bool_)
    pooled = np.full((size, batches), -np.inf)
    suite_weight, slice_weight = math.log(0.5 / SUITES), math.log(0.5 / (SUITES * SLICES))
    for losses in case.losses:
        populations = [Population(loss, DISCORDANCE) for loss in losses]
        counts = [population.counts(rng, size, batches, _BATCH_OF_SLICE) for population in populations]
        support = populations[0].support
        tests = [(sum(counts[1:], counts[0]), M_SUITE, suite_weight)]
        tests += [(part, M_SLICE, slice_weight) for part in counts]
        for part, margin, weight in tests:
            passed &= log_e_counts(support, part, -margin) >= wanted
            pooled = np.logaddexp(pooled, log_e_counts(support[::-1], part, margin) + weight)
    return passed, pooled >= wanted
