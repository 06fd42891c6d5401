"""Simulated rows of several suites and slices, judged by the code and the gate file that judge a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvgate.evals.judge.columns import Columns, Floats, Pair, columns_of
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.power import Population
from kvgate.evals.judge.rules import judge_row
from kvgate.evals.judge.simulation import Settings
from kvgate.evals.judge.types import Levels, Status
from kvgate.evals.stats.intervals import clopper_pearson

SUITES, TASKS, LENGTHS = 3, 2, (512, 1024)
SLICES = TASKS * len(LENGTHS)
DISCORDANCE = 0.05
MOST_REPLICATES = 1000  # of a row, which takes a hundred times as long as a single test
_LOOKS = (0.1, 0.2, 0.4, 0.7, 1.0)  # shares of the cap


@dataclass(frozen=True)
class RowCase:
    """True loss of every slice, ``losses[suite][slice]``, and which outcome is wrong.

    ``families``: so many policies of this kind share the gate's alpha, and any one that is enabled counts.
    ``right``: the exact run's mean score in the first slice of the first suite, where it is not competent; the policy
    loses the share ``losses[0][0]`` of what is right there.
    """

    name: str
    losses: tuple[tuple[float, ...], ...]
    enable_is_error: bool
    block_is_error: bool
    families: int = 1
    right: float | None = None


@dataclass(frozen=True)
class RowResult:
    """Rates over replicates with upper 95 % limits; ``mean_items``: items of a suite until decided or the cap."""

    name: str
    gate: str
    families: int
    enable_is_error: bool
    block_is_error: bool
    enabled: float
    enabled_upper: float
    blocked: float
    blocked_upper: float
    mean_items: float


def row_cases(gate: Gate) -> list[RowCase]:
    """What a sceptic would try on a row, at the gate's margins."""
    calm = (0.0,) * SLICES
    at_suite = (gate.m_suite,) * SLICES
    others = (calm,) * (SUITES - 1)
    gain = 0.3 / (SLICES - 1)
    return [
        RowCase("lossless", (calm, *others), False, True),
        RowCase("one suite at its margin", (at_suite, *others), True, True),
        RowCase("every suite at its margin", (at_suite,) * SUITES, True, True),
        RowCase("one slice at its margin", ((gate.m_slice, 0.0, 0.0, 0.0), *others), True, True),
        RowCase("right on average, one slice loses .3", ((0.3, -gain, -gain, -gain), *others), True, False),
        RowCase("best of 5 families, one suite at its margin", (at_suite, *others), True, False, families=5),
        RowCase("90 % lost where the exact run scores .55", ((0.9, 0.0, 0.0, 0.0), *others), True, False, right=0.55),
    ]


def run_row(case: RowCase, settings: Settings, stream: int, gate: Gate) -> RowResult:
    """Simulate one row, with a look at tenths, fifths ... of the cap."""
    rng = np.random.default_rng([settings.seed, 10_000 + stream])
    sizes = sorted({max(SLICES, int(settings.cap * share) // SLICES * SLICES) for share in _LOOKS})
    tables = [_tables(size) for size in sizes]
    levels = Levels(settings.alpha / case.families, settings.alpha, limits=False)
    replicates = min(settings.replicates, MOST_REPLICATES)
    enabled, blocked, items = (np.zeros(replicates) for _ in range(3))
    for number in range(replicates):
        looks = [_statuses(_drawn(case, rng, sizes[-1]), tables, gate, levels) for _ in range(case.families)]
        found = [{row[look] for row in looks} for look in range(len(sizes))]
        enabled[number] = any("enable" in statuses for statuses in found)
        blocked[number] = any("block" in statuses for statuses in found)
        first = next((look for look, statuses in enumerate(found) if statuses & {"enable", "block"}), len(sizes) - 1)
        items[number] = sizes[first]
    return RowResult(
        name=case.name,
        gate=gate.name,
        families=case.families,
        enable_is_error=case.enable_is_error,
        block_is_error=case.block_is_error,
        enabled=float(enabled.mean()),
        enabled_upper=clopper_pearson(float(enabled.sum()), replicates, 0.90).upper,
        blocked=float(blocked.mean()),
        blocked_upper=clopper_pearson(float(blocked.sum()), replicates, 0.90).upper,
        mean_items=float(items.mean()),
    )


def _tables(items: int) -> list[Columns]:
    """Every suite's first ``items`` items, slices in turn."""
    return columns_of(
        Pair(
            f"suite{suite}", f"task{i % TASKS}", f"{i:06d}", f"{i:06d}", 1.0, 1.0, LENGTHS[i // TASKS % len(LENGTHS)],
            exact_tokens=1, policy_tokens=1,
        )
        for suite in range(SUITES)
        for i in range(items)
    )  # fmt: skip


def _drawn(case: RowCase, rng: np.random.Generator, items: int) -> list[tuple[Floats, Floats]]:
    """Scores of both sides of every suite."""
    found = []
    for suite, losses in enumerate(case.losses):
        exact, policy = np.ones(items), np.ones(items)
        for place, loss in enumerate(losses):
            where = slice(place, None, SLICES)
            count = exact[where].size
            if case.right is not None and (suite, place) == (0, 0):
                exact[where] = rng.random(count) < case.right
                policy[where] = exact[where] * (rng.random(count) >= loss)
                continue
            population = Population(loss, DISCORDANCE)
            d = rng.choice(population.support, size=count, p=population.probabilities)
            exact[where], policy[where] = d <= 0.0, d >= 0.0
        found.append((exact, policy))
    return found


def _statuses(
    scores: Sequence[tuple[Floats, Floats]], tables: Sequence[Sequence[Columns]], gate: Gate, levels: Levels
) -> list[Status]:
    """The row's status at every look."""
    found = list[Status]()
    for suites in tables:
        size = suites[0].layout.items
        row = [table.scored(exact[:size], policy[:size]) for table, (exact, policy) in zip(suites, scores, strict=True)]
        found.append(judge_row(row, gate, levels)[0])
    return found


def at_alpha(gate: Gate, alpha: float) -> Gate:
    """The gate with the simulation's error rate."""
    return replace(gate, alpha=alpha)
