"""``kvgate rerun``: cells of a finished run made again from its record alone, and compared.

Everything comes from the results folder: the plan in ``run.json`` gives model, items and batches, and the batches that
hold the wanted cells are run again whole, since a batch may round differently from its rows alone.

On a machine like the recorded one every line has to come out byte for byte. On another (other instruction sets, threads
or libraries for matrix products) sums round differently and some answers with them, so scores are compared, and the
verdicts that the cells made again give in place of the recorded ones.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvgate.evals.leaderboard.differences import Difference, differences, short
from kvgate.evals.leaderboard.evidence import RerunRecord
from kvgate.evals.leaderboard.finished import FinishedRun, load_run, stored_leaderboard
from kvgate.evals.lm_eval.items import MADE_BY
from kvgate.evals.log.records import EXACT, CellRecord
from kvgate.evals.log.run_folder import LEADERBOARD, SAMPLES
from kvgate.evals.plan.cells import Cell, Shard
from kvgate.evals.plan.config import recorded_plan
from kvgate.evals.run.prepare import Prepared, make_engine, prepare
from kvgate.evals.run.provenance import code_hash, machine
from kvgate.evals.run.runner import Runner

IDENTITIES = ("cell_id", "config_hash")  # differ wherever model or code do, whatever the answers


class NotComparable(ValueError):
    """Model, code or versions are not those of the record."""


@dataclass(frozen=True)
class Comparison:
    """What was compared.

    Attributes:
        cells: lines compared, exact ones included. ``units``: batches run of the ``available`` ones that hold the rows.
        difference: the first that counts, or None. ``notes``: what else a reader should know.
        elsewhere: how the machine differs from the recorded one; then only scores and verdicts count.
        answers, scores: cells whose answer or score came out differently.
        verdicts: "row: was, is" of the rows whose verdict changes with the cells made again in their place.
    """

    cells: int
    units: int
    available: int
    difference: Difference | None
    notes: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    answers: int = 0
    scores: int = 0
    verdicts: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether nothing that counts came out differently."""
        return self.difference is None and not self.verdicts


@dataclass(frozen=True)
class Wanted:
    """Which cells: of one label (None: of all), maybe of one protocol only.

    And which of the batches that hold them: one, all, a random ``share`` drawn by ``seed``, or the first of each suite.
    """

    label: str | None
    protocol: str | None = None
    unit: int | None = None
    every: bool = False
    share: float | None = None
    seed: int = 0

    def has(self, cell: Cell) -> bool:
        """Whether the cell is of the rows."""
        return self.label in (None, cell.configuration.label) and self.protocol in (None, cell.item.protocol)


def rerun(
    path: Path, wanted: Wanted, *, anyway: bool = False, report: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Make cells again and compare. NotComparable unless ``anyway``, ValueError for a row or batch that is not there.

    Stops at the first difference on a machine like the recorded one, and runs everything wanted on another.
    ``report`` is told how many batches of how many are done.
    """
    run = load_run(path)
    _require_row(run, wanted)
    prepared = prepare(recorded_plan(run.manifest))
    found = obstacles(run, prepared)
    if found and not anyway:
        raise NotComparable(
            f"results folder {path}: cannot be compared, since {'; '.join(found)}; --anyway compares nevertheless"
        )
    shards, available = _shards(prepared, run, wanted)
    stale = None if found else _stale_rows(run, wanted)
    if stale is not None:
        return Comparison(0, 0, available, stale)
    elsewhere = other_machine(run)
    lines = _lines(path)
    runner = Runner(make_engine(prepared), prepared.loaded.tokenizer, prepared.manifest["config_hash"])
    made: list[CellRecord] = []
    first: Difference | None = None
    for done, shard in enumerate(shards):
        report(done, len(shards))
        for cell, record in zip(shard.cells, runner.run(shard), strict=True):
            if wanted.has(cell) or cell.policy is None:
                made.append(record)
                first = first or _compare(record, lines, IDENTITIES if found else ())
        if first is not None and not elsewhere and wanted.share is None:
            return Comparison(len(made), done + 1, available, first, tuple(found))
    return _compared(run, made, len(shards), available, first, found, elsewhere)


def _compared(
    run: FinishedRun, made: Sequence[CellRecord], units: int, available: int, first: Difference | None,
    found: Sequence[str], elsewhere: tuple[str, ...],
) -> Comparison:  # fmt: skip
    """Counts over everything that was made again; on another machine the first difference of a score is the one."""
    recorded = {(record.item_hash, record.label): record for record in run.records}
    pairs = [(recorded.get((record.item_hash, record.label)), record) for record in made]
    known = [(was, now) for was, now in pairs if was is not None]
    answers = sum([turn.tokens for turn in was.turns] != [turn.tokens for turn in now.turns] for was, now in known)
    changed = [(was, now) for was, now in known if was.score != now.score]
    if elsewhere and len(known) == len(pairs):
        first = None
        if changed:
            was, now = changed[0]
            first = Difference(_where(now), "score", was.score, now.score)
    verdicts = _changed_verdicts(run, made)
    return Comparison(
        len(made), units, available, first, tuple(found), elsewhere, answers, len(changed), tuple(verdicts)
    )


def _changed_verdicts(run: FinishedRun, made: Sequence[CellRecord]) -> Iterator[str]:
    """Rows whose verdict by the run's own gate is another one with ``made`` in place of the recorded cells."""
    again = {(record.item_hash, record.label): record for record in made}
    config_hash = run.manifest["config_hash"]
    records = tuple(
        replace(again.get((record.item_hash, record.label), record), cell_id=record.cell_id, config_hash=config_hash)
        for record in run.records
    )
    before, after = (
        {(row["label"], row["protocol"]): row["status"] for row in found.leaderboard()["rows"]}
        for found in (run, replace(run, records=records))
    )
    for label, protocol in sorted(before):
        was, now = before[label, protocol], after.get((label, protocol))
        if was != now:
            yield f"{label} ({protocol}): verdict was {was}, is {now}"


def record_of(path: Path, wanted: Wanted, found: Comparison) -> RerunRecord:
    """The evidence that a comparison of a random share is. ValueError if it is of something else."""
    if wanted.share is None or wanted.label is not None or found.notes:
        raise ValueError("evidence is a random share of all rows, made by the run's own model, code and versions")
    run = load_run(path)
    return RerunRecord(
        head=run.head,
        share=wanted.share,
        seed=wanted.seed,
        batches=found.units,
        cells=found.cells,
        answers=found.answers if found.elsewhere or found.difference is None else max(1, found.answers),
        scores=found.scores,
        verdicts=found.verdicts,
        weights_hash=run.manifest["provenance"]["model"]["weights_hash"],
        code_hash=code_hash(),
        machine=machine(),
        same_machine=not found.elsewhere,
    )


def obstacles(run: FinishedRun, prepared: Prepared) -> list[str]:
    """Why the record cannot be expected to come out again, each with both values."""
    old, new = run.manifest["provenance"], prepared.manifest["provenance"]
    pairs = [
        *(
            (f"model {key}", old["model"].get(key), new["model"].get(key))
            for key in ("weights_hash", "dtype", "device")
        ),
        ("kvgate code (code_hash)", old["code_hash"], new["code_hash"]),
        *((name, old["packages"].get(name), new["packages"].get(name)) for name in sorted(new["packages"])),
    ]
    found = [f"{what} was {was}, is {now}" for what, was, now in pairs if was != now]
    here = {item.item_hash for item in prepared.items}
    gone = {record.item_hash for record in run.records} - here
    if gone:
        found.append(f"{len(gone)} of its items come out differently (python was {old['python']}, is {new['python']})")
    return found


def _require_row(run: FinishedRun, wanted: Wanted) -> None:
    if any(MADE_BY in suite["options"] for suite in run.manifest["plan"]["suites"]):
        raise ValueError(
            f"results folder {run.path}: was made by kvgate lm-eval, whose items are lm-eval's; run that command again "
            "with another --out, and compare the folders"
        )
    rows = {(record.label, record.protocol) for record in run.records if record.label != EXACT}
    if not any(wanted.label in (None, label) and wanted.protocol in (None, protocol) for label, protocol in rows):
        known = ", ".join(f"{label} ({protocol})" for label, protocol in sorted(rows))
        raise ValueError(f"policy {wanted.label!r}: no such row in {run.path}; it has {known}")


def _stale_rows(run: FinishedRun, wanted: Wanted) -> Difference | None:
    """The stored rows against those that the samples give."""
    stored, made = stored_leaderboard(run.path), json.loads(json.dumps(run.leaderboard()))
    rows = [_rows(board, wanted) for board in (stored, made)]
    found = next(differences(rows[0], rows[1]), None)
    return Difference(f"{LEADERBOARD} against {SAMPLES}", *found) if found else None


def _rows(board: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    rows = [row for row in board.get("rows", []) if wanted.label in (None, row.get("label"))]
    wanted_rows = [row for row in rows if wanted.protocol in (None, row.get("protocol"))]
    # One row of a label is named by its protocol alone.
    return {row["protocol"] if wanted.label else f"{row['label']} {row['protocol']}": row for row in wanted_rows}


def _shards(prepared: Prepared, run: FinishedRun, wanted: Wanted) -> tuple[list[Shard], int]:
    """The shards to run, and how many hold recorded cells of the row."""
    recorded = {record.item_hash for record in run.records}
    holding = [
        shard
        for shard in prepared.shards
        if any(wanted.has(cell) for cell in shard.cells) and all(item.item_hash in recorded for item in shard.items)
    ]
    if wanted.unit is not None:
        chosen = [shard for shard in holding if shard.index == wanted.unit]
        if not chosen:
            known = f"{holding[0].index} to {holding[-1].index}" if holding else "none"
            raise ValueError(f"--unit {wanted.unit}: holds no cell of {wanted.label}; units that do: {known}")
        return chosen, len(holding)
    if wanted.share is not None:
        count = max(1, math.ceil(wanted.share * len(holding)))
        drawn = random.Random(wanted.seed).sample(range(len(holding)), count)
        return [holding[place] for place in sorted(drawn)], len(holding)
    if wanted.every:
        return holding, len(holding)
    first: dict[tuple[str, str], Shard] = {}
    for shard in holding:
        first.setdefault((shard.items[0].suite, shard.items[0].protocol), shard)
    return list(first.values()), len(holding)


def _lines(path: Path) -> dict[tuple[str, str], bytes]:
    """Raw lines by item and label."""
    found = {}
    for line in (path / SAMPLES).read_bytes().split(b"\n")[:-1]:
        row = json.loads(line)
        found[row["item_hash"], row["label"]] = line
    return found


def _where(record: CellRecord) -> str:
    return f"{record.suite}/{record.task}/{record.index} at {record.length}, {record.label}"


def _compare(record: CellRecord, lines: Mapping[tuple[str, str], bytes], ignored: Sequence[str]) -> Difference | None:
    where = _where(record)
    line, again = lines.get((record.item_hash, record.label)), record.to_json().encode()
    if line is None:
        return Difference(where, "record", None, "made")
    if line == again:
        return None
    was, now = ({k: v for k, v in json.loads(text).items() if k not in ignored} for text in (line, again))
    found = next(differences(was, now), None)
    if found is not None:
        return Difference(where, *found)
    return None if ignored else Difference(where, "bytes of the line", line.decode(), again.decode())


def other_machine(run: FinishedRun) -> tuple[str, ...]:
    """How this machine differs from the one in the record."""
    was, here = run.manifest["provenance"]["machine"], machine()
    keys = [key for key in sorted({*was, *here}) if was.get(key) != here.get(key)]
    return tuple(f"{key} was {short(was.get(key))}, is {short(here.get(key))}" for key in keys)
