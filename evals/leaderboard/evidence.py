"""``rerun.json``: a share of a run's cells made again by the model, kept beside the run as evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvgate.evals.log.records import SCHEMA_VERSION, Count, Name, Share
from kvgate.evals.log.run_folder import read_json, write_json
from kvgate.typed import STRICT, is_file, parse

RERUN = "rerun.json"


@dataclass(frozen=True)
class RerunRecord:
    """What making a random share of cells again found.

    Attributes:
        head: of the seal of the run that was compared. ``share``, ``seed``: which batches were drawn.
        batches, cells: made again. ``answers``, ``scores``: cells whose answer or score came out differently.
        weights_hash, code_hash: of what made them again. ``machine``: where.
        same_machine: whether that is as the run's, so that bytes had to be the same.
        verdicts: rows whose verdict is another one with these cells in place of the recorded ones.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    head: Name
    share: Share
    seed: Count
    batches: Count
    cells: Annotated[int, Field(ge=1)]
    answers: Count
    scores: Count
    verdicts: tuple[Name, ...]
    weights_hash: Name
    code_hash: Name
    machine: Mapping[str, Any]
    same_machine: bool
    schema_version: int = SCHEMA_VERSION

    @property
    def passed(self) -> bool:
        """Nothing that counts came out differently: no answer on the same machine, no score or verdict on another."""
        return not (self.scores or self.verdicts or (self.same_machine and self.answers))


def attach(folder: Path, record: RerunRecord) -> Path:
    """Write it beside the run, in place of an earlier one. Returns the path; ValueError where it cannot be written."""
    write_json(folder / RERUN, asdict(record))
    return folder / RERUN


def attached(folder: Path, head: str) -> RerunRecord | None:
    """The record beside a run, if it is of the run with this seal. ValueError if it cannot be read."""
    if not is_file(folder / RERUN):
        return None
    found = parse(RerunRecord, read_json(folder / RERUN), str(folder / RERUN))
    if found.schema_version != SCHEMA_VERSION:
        raise ValueError(f"{folder / RERUN}: schema_version {found.schema_version}, this kvgate reads {SCHEMA_VERSION}")
    return found if found.head == head else None
