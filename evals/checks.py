"""Is the exact run what it claims to be? A part of the run is repeated, and exact rows are run by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvgate.evals.cells import Unit
from kvgate.evals.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.runner import Runner


def run_checks(runner: Runner, units: Sequence[Unit], records: Sequence[CellRecord]) -> dict[str, Any]:
    """Repeat the first unit of each suite and protocol, whole and with its exact rows only.

    ``repeat``: the same batch again; anything but the same tokens makes the run invalid. ``batch_invariance``: the
    exact rows without the policies beside them; a difference is rounding that follows the batch, reported but not
    fatal, since every run of a plan has the same batches.
    """
    made = {record.cell_id: record for record in records}
    first: dict[tuple[str, str], Unit] = {}
    for unit in units:
        first.setdefault((unit.items[0].suite, unit.items[0].protocol), unit)
    repeat: list[bool] = []
    alone: list[bool] = []
    for unit in first.values():
        repeat += _same(runner.run(unit), made)
        exact = replace(unit, cells=tuple(cell for cell in unit.cells if cell.policy is None))
        alone += _same(runner.run(exact), made)
    return {
        "schema_version": SCHEMA_VERSION,
        "units": [unit.index for unit in first.values()],
        "repeat": {"cells": len(repeat), "different": repeat.count(False)},
        "batch_invariance": {"cells": len(alone), "different": alone.count(False)},
    }


def _same(again: Iterable[CellRecord], made: dict[str, CellRecord]) -> list[bool]:
    return [record.turns == made[record.cell_id].turns for record in again]
