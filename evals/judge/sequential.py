"""Runs that stop as soon as every question is settled (``--until-decided``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.types import RowVerdict
from kvgate.evals.judge.verdict import PAGE_SIZE, decide, nothing_tested
from kvgate.evals.log.records import CellRecord


class SequentialVerdict:
    """Takes records batch by batch and says which questions are still open.

    One may look after every batch: the e-values, and the limits by which the exact run is competent or not, stay valid
    at any stopping time. For that

    - a batch holds whole clusters, since a cluster's mean must not change once it was looked at (ValueError otherwise);
    - every batch holds the exact run and every policy on its items: rows that are settled keep running with the others,
      so that no item is missing on one side;
    - batches follow ``order``, the item hashes as they were shuffled before the first answer: a loss that begins late
      in some order of the items' own cannot wait until the verdict is made (ValueError for any other order).

    A verdict is always that of :func:`kvgate.evals.judge.verdict.decide` on everything seen so far. An enabled row may
    lose that again while others run on; nothing is remembered in its favour.
    """

    def __init__(
        self,
        gate: Gate,
        order: Sequence[str],
        *,
        repeat_identical: bool | None = None,
        declared: Mapping[str, str] | None = None,
        named: str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self._gate = gate
        self._order = list(order)
        self._at = 0
        self._repeat_identical = repeat_identical
        self._declared = dict(declared or {})
        self._named, self._page_size = named, page_size
        self._records: list[CellRecord] = []
        self._clusters: set[tuple[str, str, str]] = set()
        self.verdicts: list[RowVerdict] = []

    def feed(self, batch: Iterable[CellRecord]) -> list[RowVerdict]:
        """Add a batch and return all verdicts. ValueError names an item out of order, or a cluster fed before."""
        batch = list(batch)
        self._follow(batch)
        fresh = {(record.protocol, record.suite, record.cluster) for record in batch}
        again = sorted(fresh & self._clusters)
        if again:
            raise ValueError(
                f"cluster {again[0][2]!r} of suite {again[0][1]!r} came in two batches; feed all its items together"
            )
        self._clusters |= fresh
        self._records += batch
        self.verdicts = decide(
            self._records,
            self._gate,
            repeat_identical=self._repeat_identical,
            declared=self._declared,
            sequential=True,
            named=self._named,
            page_size=self._page_size,
        )
        return self.verdicts

    def _follow(self, batch: Sequence[CellRecord]) -> None:
        came = dict.fromkeys(record.item_hash for record in batch)
        due = self._order[self._at : self._at + len(came)]
        wrong = sorted(came.keys() ^ set(due))
        if wrong:
            raise ValueError(
                f"item {wrong[0][:12]}: looked at out of the order that was drawn before the run; a run in any other "
                "order is judged once, when it is whole"
            )
        self._at += len(due)

    @property
    def open_rows(self) -> list[RowVerdict]:
        """Rows that more items could still enable or block."""
        closed_families: set[str] = set()
        rows = []
        for verdict in self.verdicts:
            possible = verdict.alpha_enable > 0.0 and verdict.family not in closed_families
            if verdict.status == "inconclusive" and possible:
                rows.append(verdict)
            lost = verdict.status == "not_evaluable" and not nothing_tested(verdict)
            if self._named is None and (verdict.status in {"block", "invalid"} or lost):
                closed_families.add(verdict.family)
        return rows

    @property
    def decided(self) -> bool:
        """Whether no question is open; False before the first batch."""
        return bool(self.verdicts) and not self.open_rows
