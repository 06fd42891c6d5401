"""A run's folder: manifest, samples, checks, leaderboard. Written so that a kill at any moment loses at most a unit."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate.evals.log.records import CellRecord
from kvgate.evals.plan.cells import Unit

MANIFEST = "run.json"
SAMPLES = "samples.jsonl"
CHECKS = "checks.json"
LEADERBOARD = "leaderboard.json"
STOP = "stop.json"
# What must agree before a run may go on in the same folder, and how to name it.
_MUST_AGREE = (
    ("config_hash", "plan or model"),
    ("code_hash", "kvgate code"),
    ("packages", "package versions"),
    ("machine", "machine or number of threads"),
)


def write_json(path: Path, value: Any) -> None:
    """Canonical JSON, in one step."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """The file is the old one or the new one, never half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def read_json(path: Path) -> Any:
    """Decoded JSON. ValueError in one line if it is not there or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


def read_samples(path: Path) -> list[CellRecord]:
    """All records of a finished run. ValueError names the first bad line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if lines.pop() != b"":
        raise ValueError(f"{path}: the last line is incomplete; finish the run first")
    records, seen = [], set[str]()
    for number, line in enumerate(lines, 1):
        record = _decode(line, f"{path}, line {number}")
        if record.cell_id in seen:
            raise ValueError(f"{path}, line {number}: cell {record.cell_id} is there twice")
        seen.add(record.cell_id)
        records.append(record)
    return records


def _decode(line: bytes, where: str) -> CellRecord:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a mapping")
        return CellRecord.from_mapping(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class RunFolder:
    """Opens or continues a run. ValueError if the folder cannot be written or holds another run."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._samples = path / SAMPLES
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / MANIFEST).exists():
                _require_same(read_json(path / MANIFEST), manifest, path)
            elif any(path.iterdir()):
                raise ValueError(f"results folder {path}: is not empty and holds no run; choose another with --out")
            else:
                write_json(path / MANIFEST, manifest)
        except OSError as error:
            raise ValueError(f"results folder {path}: {error.strerror}; choose a writable one with --out") from error

    def resume(self, units: Sequence[Unit]) -> list[CellRecord]:
        """Records of the units that are complete; anything after them, a torn line included, is cut off."""
        if not self._samples.exists():
            return []
        done: list[CellRecord] = []
        kept = 0
        with self._samples.open("rb") as file:
            for unit in units:
                lines = [file.readline() for _ in unit.cells]
                if not all(line.endswith(b"\n") for line in lines):
                    break
                records = [_decode(line, f"{self._samples}, after byte {kept}") for line in lines]
                if [record.cell_id for record in records] != [cell.cell_id for cell in unit.cells]:
                    raise ValueError(
                        f"{self._samples}: holds samples of another plan; choose another folder with --out"
                    )
                done += records
                kept += sum(map(len, lines))
        os.truncate(self._samples, kept)
        return done

    def append(self, records: Sequence[CellRecord]) -> None:
        """Add a unit's records and make sure they are on disk."""
        with self._samples.open("ab") as file:
            file.write("".join(record.to_json() + "\n" for record in records).encode())
            file.flush()
            os.fsync(file.fileno())


def _require_same(old: Any, new: dict[str, Any], path: Path) -> None:
    if not isinstance(old, dict) or "config_hash" not in old:
        raise ValueError(f"results folder {path}: {MANIFEST} is not a kvgate manifest; choose another with --out")
    flat_old, flat_new = {**old, **old.get("provenance", {})}, {**new, **new["provenance"]}
    for key, meaning in _MUST_AGREE:
        if flat_old.get(key) != flat_new.get(key):
            raise ValueError(
                f"results folder {path}: was begun with another {meaning} ({key} differs); "
                "choose another folder with --out or delete this one"
            )
