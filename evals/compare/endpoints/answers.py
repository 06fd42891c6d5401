"""Answers of two endpoints on disk: one line an answered item, appended as it comes, so that a comparison resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvgate.evals.compare.endpoints.asking import AskedTurn

Side = Literal["exact", "candidate", "exact_again"]
SIDES: tuple[Side, ...] = ("exact", "candidate", "exact_again")
ANSWERS = "answers.jsonl"


@dataclass(frozen=True)
class AnswerRecord:
    """All turns of one item by one side. ``exact_again``: the exact endpoint asked a second time, for its noise.

    ``score``: mean over the scored turns, in [0, 1].
    """

    side: Side
    item_hash: str
    score: float
    turns: tuple[AskedTurn, ...]

    def to_json(self) -> str:
        """One canonical line, without the newline."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_mapping(row: Mapping[str, Any]) -> AnswerRecord:
        """The record in a decoded line. ValueError for what is not one."""
        try:
            turns = tuple(AskedTurn(**turn) for turn in row["turns"])
            record = AnswerRecord(row["side"], row["item_hash"], row["score"], turns)
        except (KeyError, TypeError) as error:
            raise ValueError(f"answer record: {error}") from error
        if record.side not in SIDES or not isinstance(record.item_hash, str):
            raise ValueError(f"answer record: side {record.side!r} of item {record.item_hash!r} is unknown here")
        if not isinstance(record.score, int | float) or not 0 <= record.score <= 1:
            raise ValueError(f"answer record: score is {record.score!r}, outside [0, 1]")
        return record


def make_record(side: Side, item_hash: str, turns: tuple[AskedTurn, ...]) -> AnswerRecord:
    """The record of an item's answered turns."""
    scores = [turn.score for turn in turns if turn.score is not None]
    return AnswerRecord(side, item_hash, sum(scores) / len(scores), turns)


class AnswerFile:
    """The answers of one comparison. A torn last line is cut off; a second record of an answer is refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records: dict[tuple[Side, str], AnswerRecord] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not a mapping")
                record = AnswerRecord.from_mapping(row)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{self._path}, line {number}: {error}; choose another folder with --out") from error
            if (record.side, record.item_hash) in self.records:
                raise ValueError(f"{self._path}, line {number}: {record.side} answered this item twice")
            self.records[record.side, record.item_hash] = record
        if whole != len(data):
            os.truncate(self._path, whole)

    def append(self, record: AnswerRecord) -> None:
        """Add an answer and make sure that it is on disk."""
        with self._path.open("ab") as file:
            file.write(record.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[record.side, record.item_hash] = record
