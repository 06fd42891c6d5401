"""From a plan to cells: which policy object, at which integer budget, on which item. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.compressors.catalog import policy_class
from kvgate.compressors.evidence import Span
from kvgate.compressors.policy import Policy
from kvgate.evals.data.items import Item, digest
from kvgate.evals.log.records import EXACT
from kvgate.evals.plan.config import Budget, PolicyChoice, RunConfig


@dataclass(frozen=True)
class Column:
    """One policy at one requested budget, over all items: a row of the leaderboard. The exact run has no policy."""

    label: str
    name: str
    params: Mapping[str, Any]
    request: Budget | None
    oracle: bool = False

    @property
    def ratio(self) -> float | None:
        """The requested ratio, if it was one."""
        return self.request if isinstance(self.request, float) else None


@dataclass(frozen=True)
class Cell:
    """A column on an item. ``policy`` None is the exact run."""

    item: Item
    column: Column
    policy: Policy | None
    budget: int | None
    floored: bool
    cell_id: str


EXACT_COLUMN = Column(EXACT, EXACT, {}, None)


def columns(config: RunConfig) -> list[Column]:
    """The exact run first, then each policy at each budget, as the plan lists them."""
    found = [EXACT_COLUMN]
    for choice in config.policies:
        found += [_column(choice, request) for request in choice.budgets]
    labels = [column.label for column in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"plan {config.name}: {label} is listed twice")
    if config.primary not in (None, *labels[1:]):
        raise ValueError(
            f"plan {config.name}: primary is {config.primary!r:.80}; name a row: {', '.join(labels[1:])[:400]}"
        )
    return found


def _column(choice: PolicyChoice, request: Budget) -> Column:
    name = policy_class(choice.policy).name
    if name == EXACT:
        raise ValueError("policy full: is always run, as the exact side; list only the policies to compare with it")
    shown = ",".join(f"{key}={value}" for key, value in sorted(choice.params.items()))
    budget = f"{request:.4g}" if isinstance(request, float) else str(request)
    label = f"{name}({shown})@{budget}" if shown else f"{name}@{budget}"
    return Column(label, choice.policy, dict(choice.params), request, choice.oracle)


def resolve(request: Budget, tokens: int) -> int:
    """Integer budget: ratios of ``tokens``, half rounded up, at least 1."""
    return request if isinstance(request, int) else max(1, math.floor(request * tokens + 0.5))


def eviction_length(item: Item) -> int:
    """Tokens there are when the policy first evicts: what a ratio is a ratio of."""
    if item.protocol == "whole_prompt":
        return len(item.context) + len(item.turns[0].prompt) - 1
    return len(item.context)


def make_cell(item: Item, column: Column, fingerprint: str) -> Cell:
    """The cell, its policy checked against the item. ValueError if an integer budget cannot hold what must stay.

    ``fingerprint``: hash of everything besides item and column that could change the outcome.
    """
    policy, budget, floored = None, None, False
    if column.request is not None:
        policy, budget, floored = _policy(item, column, column.request)
    identity = [fingerprint, item.item_hash, column.name, sorted(column.params.items()), budget, column.ratio]
    return Cell(item, column, policy, budget, floored, digest(identity))


def _policy(item: Item, column: Column, request: Budget) -> tuple[Policy, int, bool]:
    kind = policy_class(column.name)
    budget = resolve(request, eviction_length(item))
    least = kind.smallest_budget(**column.params)
    floored = isinstance(request, float) and budget < least
    if floored:
        budget = least
    policy = kind.for_budget(budget, **column.params)
    policy.check(tuple(Span(*span) for span in item.protected))
    return policy, budget, floored


@dataclass(frozen=True)
class Unit:
    """Items that run together: one prefill a context, one decode batch. The unit of resuming."""

    index: int
    items: tuple[Item, ...]
    cells: tuple[Cell, ...]


def units(items: Sequence[Item], found: Sequence[Column], batch_rows: int, fingerprint: str) -> Iterator[Unit]:
    """Items in plan order, as many as give at most ``batch_rows`` rows; a suite or protocol never shares a unit."""
    index, group = 0, list[Item]()
    for item in items:
        full = (len(group) + 1) * len(found) > batch_rows
        if group and (full or (group[0].suite, group[0].protocol) != (item.suite, item.protocol)):
            yield _unit(index, group, found, fingerprint)
            index, group = index + 1, []
        group.append(item)
    if group:
        yield _unit(index, group, found, fingerprint)


def _unit(index: int, group: Sequence[Item], found: Sequence[Column], fingerprint: str) -> Unit:
    cells = tuple(make_cell(item, column, fingerprint) for item in group for column in found)
    return Unit(index, tuple(group), cells)
