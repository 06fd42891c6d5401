"""A run's folder: manifest, samples, checks, seal. Written so that a kill at any moment loses at most a shard."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvgate.evals.log.lock import Lock
from kvgate.evals.log.names import CHECKS, LEADERBOARD, LOCK, MANIFEST, SAMPLES, SEAL, STOP
from kvgate.evals.log.records import CellRecord
from kvgate.evals.log.seal import LARGEST_FILE, LARGEST_SAMPLES, require_sealed, seal_of
from kvgate.typed import decode_json, read_bytes, read_text

__all__ = ["CHECKS", "LEADERBOARD", "MANIFEST", "SAMPLES", "SEAL", "STOP", "RunFolder", "read_json", "read_samples",
           "write_json", "write_seal", "write_text"]  # fmt: skip

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
    """The file is the old one or the new one, never half of it. ValueError where it cannot be written."""
    with writing(path.parent):
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


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A full disk or a folder that went away, as one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"results folder {folder}: {error.strerror or error}; what was written before is kept, so once that is "
            "mended the same command goes on where it stopped"
        ) from error


def write_seal(folder: Path) -> None:
    """Seal a finished run: from now on no file of it can be changed without being noticed."""
    write_json(folder / SEAL, seal_of(folder).to_dict())


def read_json(path: Path) -> Any:
    """Decoded JSON. ValueError in one line if it is not there or not JSON."""
    return decode_json(read_text(path, LARGEST_FILE), str(path))


def read_samples(path: Path) -> list[CellRecord]:
    """All records of a finished run. ValueError names the first bad line."""
    lines = read_bytes(path, LARGEST_SAMPLES).split(b"\n")
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
        return CellRecord.from_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class RunFolder:
    """A run's folder, opened or continued by this process alone; leave it with ``with``.

    ValueError if the folder cannot be written, holds another run, is in use by another process, or if a finished run in
    it is not as it was sealed.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._samples = path / SAMPLES
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"results folder {path}: {error.strerror}; choose a writable one with --out") from error
        self._lock = Lock(path / LOCK)
        try:
            self._open(manifest)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, manifest: dict[str, Any]) -> None:
        path = self.path
        if (path / MANIFEST).exists():
            _require_same(read_json(path / MANIFEST), manifest, path)
        elif any(file.name != LOCK for file in path.iterdir()):
            raise ValueError(f"results folder {path}: is not empty and holds no run; choose another with --out")
        else:
            write_json(path / MANIFEST, manifest)
        if (path / SEAL).exists():
            require_sealed(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def resume(self, shards: Sequence[Sequence[str]]) -> list[CellRecord]:
        """Records of the shards that are complete; anything after them, a torn line included, is cut off.

        ``shards``: the cell ids of each shard, in the order they are run.
        """
        if not self._samples.exists():
            return []
        done: list[CellRecord] = []
        kept = 0
        with self._samples.open("rb") as file:
            for cells in shards:
                lines = [file.readline() for _ in cells]
                if not all(line.endswith(b"\n") for line in lines):
                    break
                records = [_decode(line, f"{self._samples}, after byte {kept}") for line in lines]
                if [record.cell_id for record in records] != list(cells):
                    raise ValueError(
                        f"{self._samples}: holds samples of another plan; choose another folder with --out"
                    )
                done += records
                kept += sum(map(len, lines))
        with writing(self.path):
            os.truncate(self._samples, kept)
        return done

    def append(self, records: Sequence[CellRecord]) -> None:
        """Add a shard's records and make sure they are on disk."""
        with writing(self.path), self._samples.open("ab") as file:
            file.write("".join(record.to_json() + "\n" for record in records).encode())
            file.flush()
            os.fsync(file.fileno())


def _require_same(old: Any, new: dict[str, Any], path: Path) -> None:
    if not isinstance(old, dict) or "config_hash" not in old or not isinstance(old.get("provenance", {}), dict):
        raise ValueError(f"results folder {path}: {MANIFEST} is not a kvgate manifest; choose another with --out")
    if old.get("schema_version") != new["schema_version"]:
        raise ValueError(
            f"results folder {path}: was begun by another version of kvgate (schema {old.get('schema_version')!r:.20}, "
            f"this one writes {new['schema_version']}); choose another folder with --out"
        )
    flat_old, flat_new = {**old, **old.get("provenance", {})}, {**new, **new["provenance"]}
    for key, meaning in _MUST_AGREE:
        if flat_old.get(key) != flat_new.get(key):
            raise ValueError(
                f"results folder {path}: was begun with another {meaning} ({key} differs); "
                "choose another folder with --out or delete this one"
            )
