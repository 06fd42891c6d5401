"""Runs that stop as soon as every question is settled (``--until-decided``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.types import RowVerdict
from kvgate.evals.judge.verdict import decide, nothing_tested
from kvgate.evals.log.records import CellRecord


class SequentialVerdict:
    """Takes records batch by batch and says which questions are still open.

    One may look after every batch: the e-values, and the limits by which the exact run is competent or not, stay valid
    at any stopping time. For that

    - a batch holds whole clusters, since a cluster's mean must not change once it was looked at (ValueError otherwise);
    - every batch holds the exact run and every policy on its items: rows that are settled keep running with the others,
      so that no item is missing on one side;
    - batches visit the slices evenly, in an order fixed before the run (see ``statistics``).

    A verdict is always that of :func:`kvgate.evals.judge.verdict.decide` on everything seen so far. An enabled row may
    lose that again while others run on; nothing is remembered in its favour.
    """

    def __init__(
        self, gate: Gate, *, repeat_identical: bool | None = None, declared: Mapping[str, str] | None = None
    ) -> None:
        self._gate = gate
        self._repeat_identical = repeat_identical
        self._declared = dict(declared or {})
        self._records: list[CellRecord] = []
        self._clusters: set[tuple[str, str, str]] = set()
        self.verdicts: list[RowVerdict] = []

    def feed(self, batch: Iterable[CellRecord]) -> list[RowVerdict]:
        """Add a batch and return all verdicts. ValueError names a cluster that was fed before."""
        batch = list(batch)
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
        )
        return self.verdicts

    @property
    def open_rows(self) -> list[RowVerdict]:
        """Rows that more items could still enable or block."""
        closed_families: set[str] = set()
        rows = []
        for verdict in self.verdicts:
            if verdict.status == "inconclusive" and verdict.family not in closed_families:
                rows.append(verdict)
            if verdict.status in {"block", "invalid"} or (
                verdict.status == "not_evaluable" and not nothing_tested(verdict)
            ):
                closed_families.add(verdict.family)
        return rows

    @property
    def decided(self) -> bool:
        """Whether no question is open; False before the first batch."""
        return bool(self.verdicts) and not self.open_rows
