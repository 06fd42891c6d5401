"""Public data sets as suites: rows from the hub at a pinned revision, or from a local copy with the same layout.

Nothing is cut: a row counts for the smallest asked-for length that holds it, and rows that are longer than all of them
are passed over. Rows keep the order of their file.
"""

from __future__ import annotations

import json
import re
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from kvgate.evals.data.items import Item, digest
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import BuildSpec, Suite

Row = Mapping[str, Any]
# Longer than any tokenizer's average for prose or code: only spares us the tokenising of rows that cannot fit.
CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Source:
    """Where a data set lives.

    Attributes:
        repo: hub id.
        revision: full commit hash; None where kvgate knows none, and then the user has to give one.
        licence: as the hub's card states it.
        files: task -> path in the repository; may have wildcards; ``archive.zip/inner`` is read inside the archive.
    """

    repo: str
    revision: str | None
    licence: str
    files: Mapping[str, str]


class HubSuite(Suite):
    """A data set. Subclasses turn one row into one item; the length and the index are filled in here."""

    source: ClassVar[Source]
    options: ClassVar[Mapping[str, Any]] = {"path": "", "revision": ""}

    @classmethod
    def has_depth(cls, task: str) -> bool:
        """Rows do not say where their evidence stands."""
        return False

    @classmethod
    def origin(cls) -> str:
        """Repository, revision and licence."""
        revision = cls.source.revision or "a revision that you give"
        return f"{cls.source.repo} at {revision}; licence: {cls.source.licence}"

    @abstractmethod
    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """The row's item, with length 0 and index 0. ValueError names a field that is missing or ill-typed."""

    def usable(self, row: Row) -> bool:
        """Whether the row can be scored here at all."""
        return True

    def build(self, tokens: Tokens, spec: BuildSpec) -> list[Item]:
        """Items by task, then length. ValueError where there are fewer rows of a length than asked for."""
        options = self.settled(spec.options)
        items: list[Item] = []
        for task in self.chosen(spec.tasks):
            items.extend(self._task(tokens, task, spec, options))
        return items

    def _task(self, tokens: Tokens, task: str, spec: BuildSpec, options: Mapping[str, Any]) -> list[Item]:
        found: dict[int, list[Item]] = {length: [] for length, count in sorted(spec.counts.items()) if count}
        if not found:
            return []
        for number, row in enumerate(rows(self.source, task, options["path"], options["revision"])):
            if all(len(items) == spec.counts[length] for length, items in found.items()):
                break
            if not self.usable(row):
                continue
            if sum(len(value) for value in row.values() if isinstance(value, str)) > CHARS_PER_TOKEN * max(found):
                continue
            try:
                item = self.item(tokens, task, row)
            except ValueError as error:
                raise ValueError(f"suite {self.name}: {task} row {number}: {error}") from error
            length = next((length for length in found if item.longest <= length), None)
            if length is not None and len(found[length]) < spec.counts[length]:
                found[length].append(self._placed(item, length, len(found[length]), options))
        for length, items in found.items():
            if len(items) < spec.counts[length]:
                raise ValueError(
                    f"suite {self.name}: {task} has {len(items)} rows of up to {length} tokens, "
                    f"{spec.counts[length]} were asked for; ask for fewer or for longer ones"
                )
        return [item for items in found.values() for item in items]

    def _placed(self, item: Item, length: int, index: int, options: Mapping[str, Any]) -> Item:
        origin = "local copy" if options["path"] else pinned(self.source, options["revision"])
        meta = {**item.meta, "source": self.source.repo, "revision": origin, "licence": self.source.licence}
        return replace(item, length=length, index=index, meta=meta)


def cluster(task: str, *parts: str) -> str:
    """Items with the same text share a cluster."""
    return f"{task}-{digest(parts)[:12]}"


def field(row: Row, name: str, kind: type | tuple[type, ...] = str) -> Any:
    """A field of the row. ValueError names it where it is missing or of another type."""
    if name not in row or row[name] is None:
        raise ValueError(f"field {name!r} is missing; the row has {', '.join(sorted(row))}")
    if not isinstance(row[name], kind):
        raise ValueError(f"field {name!r} is {type(row[name]).__name__}")
    return row[name]


def texts(row: Row, name: str) -> tuple[str, ...]:
    """A field that holds one text or several. ValueError if it holds none."""
    value = field(row, name, (str, int, float, list, tuple))
    found = tuple(str(one) for one in (value if isinstance(value, list | tuple) else [value]))
    if not any(text.strip() for text in found):
        raise ValueError(f"field {name!r} is empty")
    return found


def pinned(source: Source, revision: str) -> str:
    """The commit to read. ValueError for a branch name, or where none is known."""
    chosen = revision or source.revision
    if chosen is None:
        raise ValueError(f"data set {source.repo}: no revision is known; give option revision (40 hex digits) or path")
    if not re.fullmatch(r"[0-9a-f]{40}", chosen):
        raise ValueError(f"data set {source.repo}: revision {chosen!r} is not a full commit hash; branches move")
    return chosen


def rows(source: Source, task: str, path: str, revision: str) -> Iterator[Row]:
    """Rows of a task's files, from the local folder ``path`` or, if that is "", from the hub."""
    pattern = source.files[task]
    for file in _local(source, path, pattern) if path else _remote(source, pattern, pinned(source, revision)):
        yield from _read(file, pattern)


def _local(source: Source, path: str, pattern: str) -> list[Path]:
    root = Path(path)
    outer = pattern.partition(".zip/")[0] + (".zip" if ".zip/" in pattern else "")
    inner = pattern.partition(".zip/")[2]
    # A clone of the repository, an unpacked archive, or the bare files.
    tries = [outer, *([inner] if inner else []), Path(pattern).name]
    for attempt in tries:
        if files := sorted(root.glob(attempt)):
            return files
    raise ValueError(f"data set {source.repo}: {root} has no {' or '.join(tries)}; copy the repository's files there")


def _remote(source: Source, pattern: str, revision: str) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    outer = pattern.partition(".zip/")[0] + (".zip" if ".zip/" in pattern else "")
    where: dict[str, Any] = {"repo_id": source.repo, "repo_type": "dataset", "revision": revision}
    try:
        wild = "*" in outer
        names = [name for name in HfApi().list_repo_files(**where) if fnmatch(name, outer)] if wild else [outer]
        return [Path(hf_hub_download(filename=name, **where)) for name in sorted(names)]
    except Exception as error:  # whatever the network, the hub or its client come up with
        raise ValueError(
            f"data set {source.repo}: the hub cannot be reached or has no such revision ({type(error).__name__}); "
            f"copy {outer} at {revision[:12]} to a folder and give option path"
        ) from error


def _read(file: Path, pattern: str) -> Iterator[Row]:
    try:
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive, archive.open(pattern.partition(".zip/")[2]) as inner:
                yield from _json_rows(inner.read().decode("utf-8-sig"))
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from _json_rows(file.read_text("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, zipfile.BadZipFile, OSError, RecursionError) as error:
        raise ValueError(f"data file {file.name} cannot be read: {error}; download it again") from error


def _parquet_rows(file: Path) -> Iterator[Row]:
    from datasets import load_dataset

    # Streaming neither copies the data into a cache nor reads more of it than is asked for.
    yield from load_dataset("parquet", data_files=str(file), split="train", streaming=True)


def _json_rows(text: str) -> Iterator[Row]:
    """A JSON array, or one object a line. Not through ``datasets``: it refuses columns of mixed types."""
    parsed = (
        json.loads(text)
        if text.lstrip().startswith("[")
        else (json.loads(line) for line in text.split("\n") if line.strip())
    )
    for row in parsed:
        if not isinstance(row, dict):
            raise json.JSONDecodeError("a row is not an object", text, 0)
        yield row
