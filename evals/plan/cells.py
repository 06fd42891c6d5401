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
class Configuration:
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
    """A configuration on an item. ``policy`` None is the exact run."""

    item: Item
    configuration: Configuration
    policy: Policy | None
    budget: int | None
    floored: bool
    cell_id: str


EXACT_CONFIGURATION = Configuration(EXACT, EXACT, {}, None)


def configurations(config: RunConfig) -> list[Configuration]:
    """The exact run first, then each policy at each budget, as the plan lists them."""
    found = [EXACT_CONFIGURATION]
    for choice in config.policies:
        found += [_configuration(choice, request) for request in choice.budgets]
    labels = [configuration.label for configuration in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"plan {config.name}: {label} is listed twice")
    if config.primary not in (None, *labels[1:]):
        raise ValueError(
            f"plan {config.name}: primary is {config.primary!r:.80}; name a row: {', '.join(labels[1:])[:400]}"
        )
    return found


def _configuration(choice: PolicyChoice, request: Budget) -> Configuration:
    name = policy_class(choice.policy).name
    if name == EXACT:
        raise ValueError("policy full: is always run, as the exact side; list only the policies to compare with it")
    shown = ",".join(f"{key}={value}" for key, value in sorted(choice.params.items()))
    budget = f"{request:.4g}" if isinstance(request, float) else str(request)
    label = f"{name}({shown})@{budget}" if shown else f"{name}@{budget}"
    return Configuration(label, choice.policy, dict(choice.params), request, choice.oracle)


def resolve(request: Budget, tokens: int) -> int:
    """Integer budget: ratios of ``tokens``, half rounded up, at least 1."""
    return request if isinstance(request, int) else max(1, math.floor(request * tokens + 0.5))


def eviction_length(item: Item) -> int:
    """Tokens there are when the policy first evicts: what a ratio is a ratio of."""
    if item.protocol == "whole_prompt":
        return len(item.context) + len(item.turns[0].prompt) - 1
    return len(item.context)


def make_cell(item: Item, configuration: Configuration, fingerprint: str) -> Cell:
    """The cell, its policy checked against the item. ValueError if an integer budget cannot hold what must stay.

    ``fingerprint``: hash of everything besides item and configuration that could change the outcome.
    """
    policy, budget, floored = None, None, False
    if configuration.request is not None:
        policy, budget, floored = _policy(item, configuration, configuration.request)
    identity = [
        fingerprint,
        item.item_hash,
        configuration.name,
        sorted(configuration.params.items()),
        budget,
        configuration.ratio,
    ]
    return Cell(item, configuration, policy, budget, floored, digest(identity))


def _policy(item: Item, configuration: Configuration, request: Budget) -> tuple[Policy, int, bool]:
    kind = policy_class(configuration.name)
    budget = resolve(request, eviction_length(item))
    least = kind.smallest_budget(**configuration.params)
    floored = isinstance(request, float) and budget < least
    if floored:
        budget = least
    policy = kind.for_budget(budget, **configuration.params)
    policy.check(tuple(Span(*span) for span in item.protected))
    return policy, budget, floored


@dataclass(frozen=True)
class Shard:
    """Items that run together: one prefill a context, one decode batch. What is lost at most when a run is killed."""

    index: int
    items: tuple[Item, ...]
    cells: tuple[Cell, ...]


def shards(items: Sequence[Item], found: Sequence[Configuration], batch_rows: int, fingerprint: str) -> Iterator[Shard]:
    """Items in plan order, as many as give at most ``batch_rows`` rows; a suite or protocol never shares a shard."""
    index, group = 0, list[Item]()
    for item in items:
        full = (len(group) + 1) * len(found) > batch_rows
        if group and (full or (group[0].suite, group[0].protocol) != (item.suite, item.protocol)):
            yield _shard(index, group, found, fingerprint)
            index, group = index + 1, []
        group.append(item)
    if group:
        yield _shard(index, group, found, fingerprint)


def _shard(index: int, group: Sequence[Item], found: Sequence[Configuration], fingerprint: str) -> Shard:
    cells = tuple(make_cell(item, configuration, fingerprint) for item in group for configuration in found)
    return Shard(index, tuple(group), cells)
