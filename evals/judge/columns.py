"""Pairs of one suite as columns: what the rules add up, without the records behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SliceKey = Literal["task", "length", "depth"]
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Pair:
    """One item under the exact run and under the candidate.

    Attributes:
        exact, policy: scores in [0, 1] of the two sides.
        cluster: items of a suite that share it count as one observation.
        length: nominal context length, ``depth`` the name of the bin where its evidence stands; None where unknown.
        exact_tokens, policy_tokens: lengths of the answers; ``context_tokens`` of the context. 0 where unknown.
    """

    suite: str
    task: str
    item: str
    cluster: str
    exact: float
    policy: float
    length: int | None = None
    depth: str | None = None
    exact_tokens: int = 0
    policy_tokens: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the items of a suite stand: the same for every policy. Columns are ``[items]``.

    Attributes:
        keys: the values of task, length and depth, an object array each.
        clusters: cluster of each item, as its rank among the names in order.
    """

    suite: str
    keys: Mapping[SliceKey, NDArray[np.object_]]
    clusters: Indices
    _groups: dict[tuple[SliceKey, ...], list[tuple[dict[str, Any], Indices]]] = field(default_factory=dict)

    @property
    def items(self) -> int:
        """Number of items."""
        return int(self.clusters.size)

    def groups(self, keys: tuple[SliceKey, ...]) -> list[tuple[dict[str, Any], Indices]]:
        """Items by ``keys``, in order of the keys; one group of all items for no keys."""
        if keys not in self._groups:
            found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
            for place, values in enumerate(zip(*(self.keys[key] for key in keys), strict=True)):
                found[values].append(place)
            order = sorted(found, key=lambda group: tuple((value is not None, value) for value in group))
            self._groups[keys] = [
                (dict(zip(keys, group, strict=True)), np.array(found[group], dtype=np.intp)) for group in order
            ]
        return self._groups[keys]


@dataclass(frozen=True, eq=False)
class Columns:
    """Scores of a suite's items on both sides, ``[items]`` each; ``tokens`` are the lengths of the answers."""

    layout: Layout
    exact: Floats
    policy: Floats
    exact_tokens: Floats
    policy_tokens: Floats
    context_tokens: Floats

    @property
    def suite(self) -> str:
        """Name of the suite."""
        return self.layout.suite

    @cached_property
    def everything(self) -> Indices:
        """All items."""
        return np.arange(self.layout.items)

    def scored(self, exact: Floats, policy: Floats) -> Columns:
        """The same items with other scores."""
        return replace(self, exact=exact, policy=policy)


def columns_of(pairs: Iterable[Pair]) -> list[Columns]:
    """One table a suite, suites in order of name, items in order of name: sums do not follow the order of a file."""
    suites: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        suites[pair.suite].append(pair)
    return [_columns(suite, sorted(suites[suite], key=lambda pair: pair.item)) for suite in sorted(suites)]


def _columns(suite: str, pairs: Sequence[Pair]) -> Columns:
    _, clusters = np.unique([pair.cluster for pair in pairs], return_inverse=True)
    layout = Layout(
        suite,
        {
            "task": _objects([pair.task for pair in pairs]),
            "length": _objects([pair.length for pair in pairs]),
            "depth": _objects([pair.depth for pair in pairs]),
        },
        clusters.astype(np.intp),
    )

    def floats(values: Iterable[float]) -> Floats:
        return np.fromiter(values, dtype=np.float64, count=len(pairs))

    return Columns(
        layout,
        floats(pair.exact for pair in pairs),
        floats(pair.policy for pair in pairs),
        floats(pair.exact_tokens for pair in pairs),
        floats(pair.policy_tokens for pair in pairs),
        floats(pair.context_tokens for pair in pairs),
    )


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    column = np.empty(len(values), dtype=np.object_)
    column[:] = values
    return column
