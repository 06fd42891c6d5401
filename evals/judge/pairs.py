"""Records into rows, and a row into pairs and clusters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvgate.evals.judge.columns import Pair
from kvgate.evals.judge.gates import Gate
from kvgate.evals.log.records import CellRecord


@dataclass(frozen=True)
class Row:
    """Everything recorded for one policy label under one protocol, and the exact records of that protocol."""

    label: str
    protocol: str
    cells: tuple[CellRecord, ...]
    exact: tuple[CellRecord, ...]

    @property
    def budget(self) -> float:
        """Tokens per (layer, kv head), mean over cells."""
        budgets = [cell.budget for cell in self.cells if cell.budget is not None]
        return sum(budgets) / len(budgets) if budgets else 0.0

    @property
    def family(self) -> str:
        """Names the policy without its budget."""
        return family_of(self.cells[0])

    @property
    def covered(self) -> bool:
        """Whether the budget holds every item whole."""
        return all(cell.covered for cell in self.cells)


def family_of(cell: CellRecord) -> str:
    """The policy, its protocol and the parameters that the plan gives beside the budget.

    What a policy makes of its budget (``params``) is not looked at: no name tells a budget from a parameter.
    """
    text = ", ".join(f"{key}={value}" for key, value in sorted((cell.settings or {}).items()))
    return f"{cell.policy}({text}) {cell.protocol}"


def rows_of(records: Iterable[CellRecord]) -> list[Row]:
    """One row for each (label, protocol), in order of label; the exact run makes none."""
    exact: dict[str, list[CellRecord]] = defaultdict(list)
    cells: dict[tuple[str, str], list[CellRecord]] = defaultdict(list)
    for record in records:
        if record.exact:
            exact[record.protocol].append(record)
        else:
            cells[record.label, record.protocol].append(record)
    return [
        Row(label, protocol, _ordered(found), _ordered(exact[protocol]))
        for (label, protocol), found in sorted(cells.items())
    ]


def _ordered(records: Iterable[CellRecord]) -> tuple[CellRecord, ...]:
    """Sorted, so that sums do not depend on the order of a file."""
    return tuple(sorted(records, key=lambda record: (record.item_hash, record.cell_id)))


def acting_pairs(row: Row, gate: Gate) -> list[Pair]:
    """Pairs of the items that the budget does not hold whole, in order of item hash. Call on a valid row only."""
    exact = {record.item_hash: record for record in row.exact}
    names = merged_clusters(row.cells)
    return [
        Pair(
            suite=cell.suite,
            task=cell.task,
            item=cell.item_hash,
            cluster=names[cell.item_hash],
            exact=exact[cell.item_hash].score,
            policy=cell.score,
            length=cell.length,
            depth=gate.depth_bin(cell.depth),
            exact_tokens=exact[cell.item_hash].output_tokens,
            policy_tokens=cell.output_tokens,
            context_tokens=cell.context_tokens,
        )
        for cell in row.cells
        if not cell.covered
    ]


class Member(Protocol):
    """An item or a record of one: what says which observations depend on each other."""

    @property
    def suite(self) -> str: ...
    @property
    def cluster(self) -> str: ...
    @property
    def context_hash(self) -> str: ...
    @property
    def item_hash(self) -> str: ...


def merged_clusters(cells: Sequence[Member]) -> dict[str, str]:
    """Item hash to cluster. Items of a suite that name the same cluster or share a context are one cluster.

    A shared context makes items dependent whatever a suite calls its clusters, so both links are followed.
    """
    parent: dict[Any, Any] = {}

    def root(key: Any) -> Any:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for cell in cells:
        first, second = root((cell.suite, "cluster", cell.cluster)), root((cell.suite, "context", cell.context_hash))
        parent[max(first, second)] = min(first, second)
    return {cell.item_hash: "/".join(root((cell.suite, "cluster", cell.cluster))) for cell in cells}
