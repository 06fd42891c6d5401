"""``kvgate rerun``: a leaderboard row made again from its record alone, compared byte for byte.

Everything comes from the results folder: the plan in ``run.json`` gives model, items and batches, the units that hold
the row are run again whole, since a batch may round differently from its rows alone, and each line is compared with the
one in ``samples.jsonl``. The row itself is compared with what the samples give before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate.evals.leaderboard.finished import FinishedRun, load_run, recorded_plan, stored_leaderboard
from kvgate.evals.lm_eval.items import MADE_BY
from kvgate.evals.log.records import EXACT, CellRecord
from kvgate.evals.log.run_folder import LEADERBOARD, SAMPLES
from kvgate.evals.plan.cells import Cell, Unit
from kvgate.evals.run.prepare import Prepared, make_engine, prepare
from kvgate.evals.run.provenance import machine
from kvgate.evals.run.runner import Runner

IDENTITIES = ("cell_id", "config_hash")  # differ wherever model or code do, whatever the answers


class NotComparable(ValueError):
    """Model, code or versions are not those of the record."""


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as recorded: which cell, which field, both values."""

    where: str
    field: str
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.field} was {_short(self.recorded)}, is {_short(self.found)}"


@dataclass(frozen=True)
class Comparison:
    """What was compared.

    Attributes:
        cells: lines compared, exact ones included. ``units``: how many of the ``available`` ones that hold the row.
        difference: the first, or None. ``notes``: what else a reader should know (another machine).
    """

    cells: int
    units: int
    available: int
    difference: Difference | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Which cells: a label, maybe one protocol only, and one unit, all units, or the first of each suite."""

    label: str
    protocol: str | None = None
    unit: int | None = None
    every: bool = False

    def has(self, cell: Cell) -> bool:
        """Whether the cell is of the row."""
        return cell.column.label == self.label and self.protocol in (None, cell.item.protocol)


def rerun(
    path: Path, wanted: Wanted, *, anyway: bool = False, report: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Make a row again and compare. NotComparable unless ``anyway``, ValueError for a row or unit that is not there.

    ``report`` is told how many units of how many are done.
    """
    run = load_run(path)
    _require_row(run, wanted)
    prepared = prepare(recorded_plan(run.manifest))
    found = obstacles(run, prepared)
    if found and not anyway:
        raise NotComparable(
            f"results folder {path}: cannot be compared, since {'; '.join(found)}; --anyway compares nevertheless"
        )
    units, available = _units(prepared, run, wanted)
    stale = None if found else _stale_row(run, wanted)
    if stale is not None:
        return Comparison(0, 0, available, stale)
    lines = _lines(path)
    runner = Runner(make_engine(prepared), prepared.loaded.tokenizer, prepared.manifest["config_hash"])
    cells = 0
    for done, unit in enumerate(units):
        report(done, len(units))
        for cell, record in zip(unit.cells, runner.run(unit), strict=True):
            if not (wanted.has(cell) or cell.policy is None):
                continue
            cells += 1
            difference = _compare(record, lines, ignored=IDENTITIES if found else ())
            if difference is not None:
                return Comparison(cells, done + 1, available, difference, _notes(run, found))
    return Comparison(cells, len(units), available, None, _notes(run, found))


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
    if not any(label == wanted.label and wanted.protocol in (None, protocol) for label, protocol in rows):
        known = ", ".join(f"{label} ({protocol})" for label, protocol in sorted(rows))
        raise ValueError(f"policy {wanted.label!r}: no such row in {run.path}; it has {known}")


def _stale_row(run: FinishedRun, wanted: Wanted) -> Difference | None:
    """The stored row against the one that the samples give."""
    stored, made = stored_leaderboard(run.path), json.loads(json.dumps(run.leaderboard()))
    rows = [_rows(board, wanted) for board in (stored, made)]
    found = next(differences(rows[0], rows[1]), None)
    return Difference(f"{LEADERBOARD} against {SAMPLES}", *found) if found else None


def _rows(board: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    rows = [row for row in board.get("rows", []) if row.get("label") == wanted.label]
    return {row["protocol"]: row for row in rows if wanted.protocol in (None, row.get("protocol"))}


def _units(prepared: Prepared, run: FinishedRun, wanted: Wanted) -> tuple[list[Unit], int]:
    """The units to run, and how many hold recorded cells of the row."""
    recorded = {record.item_hash for record in run.records}
    holding = [
        unit
        for unit in prepared.units
        if any(wanted.has(cell) for cell in unit.cells) and all(item.item_hash in recorded for item in unit.items)
    ]
    if wanted.unit is not None:
        chosen = [unit for unit in holding if unit.index == wanted.unit]
        if not chosen:
            known = f"{holding[0].index} to {holding[-1].index}" if holding else "none"
            raise ValueError(f"--unit {wanted.unit}: holds no cell of {wanted.label}; units that do: {known}")
        return chosen, len(holding)
    if wanted.every:
        return holding, len(holding)
    first: dict[tuple[str, str], Unit] = {}
    for unit in holding:
        first.setdefault((unit.items[0].suite, unit.items[0].protocol), unit)
    return list(first.values()), len(holding)


def _lines(path: Path) -> dict[tuple[str, str], bytes]:
    """Raw lines by item and label."""
    found = {}
    for line in (path / SAMPLES).read_bytes().split(b"\n")[:-1]:
        row = json.loads(line)
        found[row["item_hash"], row["label"]] = line
    return found


def _compare(record: CellRecord, lines: Mapping[tuple[str, str], bytes], ignored: Sequence[str]) -> Difference | None:
    where = f"{record.suite}/{record.task}/{record.index} at {record.length}, {record.label}"
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


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every (field, old value, new value) at which two decoded JSON values differ, in order of field."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{name}[{place}]")
    elif old != new or type(old) is not type(new):
        yield name, old, new


def _notes(run: FinishedRun, found: Sequence[str]) -> tuple[str, ...]:
    was, here = run.manifest["provenance"]["machine"], machine()
    keys = [key for key in sorted({*was, *here}) if was.get(key) != here.get(key)]
    other = [f"{key} was {was.get(key)}, is {here.get(key)}" for key in keys]
    return (*found, *([f"another machine: {', '.join(other)}; sums may round differently"] if other else []))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."
