"""Pairs or scores as CSV or JSON lines: task, item, maybe cluster, and one score or both."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvgate.evals.compare.judge import ScoredPair
from kvgate.evals.compare.readers.side import Entry, Side
from kvgate.typed import MIB, decode_json, read_text

LARGEST = 1024 * MIB
EXACT, CANDIDATE, ONE = ("score_exact", "score_a"), ("score_candidate", "score_policy", "score_b"), ("score",)


def read_pairs(path: Path) -> list[ScoredPair]:
    """A file with both scores. ValueError names the line and the field."""
    found = []
    for where, row in _rows(path):
        key, cluster = _item(row, where)
        found.append(ScoredPair(*key, cluster, _score(row, EXACT, where), _score(row, CANDIDATE, where)))
    return found


def read_side(path: Path) -> Side:
    """A file with one score an item."""
    found: dict[tuple[str, str], Entry] = {}
    for where, row in _rows(path):
        key, cluster = _item(row, where)
        if key in found:
            raise ValueError(f"{where}: item {key[1]!r:.80} of task {key[0]} comes twice")
        found[key] = Entry(_score(row, ONE, where), cluster)
    return found


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = read_text(path, LARGEST)
    if path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            for row in reader:
                yield f"{path}, line {reader.line_num}", row
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from error
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            row = decode_json(line, where)
            if not isinstance(row, dict):
                raise ValueError(f"{where}: is {type(row).__name__}; give a mapping with task, item and scores")
            yield where, row


def _item(row: Mapping[str, Any], where: str) -> tuple[tuple[str, str], str | None]:
    texts = {}
    for name in ("task", "item", "cluster"):
        value = row.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, str | int | None)
            or (name != "cluster" and value in (None, ""))
        ):
            raise ValueError(f"{where}: {name} is {value!r:.80}; give a text or a number")
        texts[name] = None if value in (None, "") else str(value)
    return (str(texts["task"]), str(texts["item"])), texts["cluster"]


def _score(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> float:
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    if name is None:
        raise ValueError(f"{where}: no {' or '.join(names)}; it has {', '.join(str(key) for key in row)[:200]}")
    try:
        value = float(row[name]) if not isinstance(row[name], bool) else math.nan
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{where}: {name} is {row[name]!r:.40}; give a number in [0, 1]")
    return value
