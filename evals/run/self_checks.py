"""Is the exact run what it claims to be? A part of the run is repeated, and exact rows are run by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.plan.cells import Shard
from kvgate.evals.run.runner import Runner


def run_checks(runner: Runner, shards: Sequence[Shard], records: Sequence[CellRecord]) -> dict[str, Any]:
    """Repeat the first shard of each suite and protocol, whole and with its exact rows only.

    ``repeat``: the same batch again, after everything else was run. If the exact run gives other tokens, the whole run
    is invalid; if a policy does, its rows are: it carries state from item to item, or is not deterministic.
    ``batch_invariance``: the exact rows without the policies beside them; a difference is rounding that follows the
    batch, reported but not fatal, since every run of a plan has the same batches.
    """
    made = {record.cell_id: record for record in records}
    first: dict[tuple[str, str], Shard] = {}
    for shard in shards:
        first.setdefault((shard.items[0].suite, shard.items[0].protocol), shard)
    repeat: dict[str, list[bool]] = {}
    alone: list[bool] = []
    for shard in first.values():
        for record in runner.run(shard):
            repeat.setdefault(record.label, []).append(_same(record, made))
        exact = replace(shard, cells=tuple(cell for cell in shard.cells if cell.policy is None))
        alone += [_same(record, made) for record in runner.run(exact)]
    return {
        "schema_version": SCHEMA_VERSION,
        "units": [shard.index for shard in first.values()],
        "repeat": {label: _counted(found) for label, found in sorted(repeat.items())},
        "batch_invariance": _counted(alone),
    }


def _same(again: CellRecord, made: Mapping[str, CellRecord]) -> bool:
    before = made[again.cell_id]
    return (again.turns, again.evicted_tokens) == (before.turns, before.evicted_tokens)


def _counted(found: Sequence[bool]) -> dict[str, int]:
    return {"cells": len(found), "different": found.count(False)}
