"""An append-only journal: one JSON line an event, chained by hashes, safe against a crash at any byte.

Server and command line write to the same file under a lock; whoever writes reads first what the other has written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "journal.jsonl"


@dataclass(frozen=True)
class Event:
    """``seq`` counts from 1; ``at`` is Unix time in seconds; ``kind`` and ``data`` say what happened."""

    seq: int
    at: float
    kind: str
    data: Mapping[str, Any]


class Journal:
    """The journal in ``folder``, which is made if it is not there.

    Raises ValueError, naming the line, for a file whose chain is broken. A last line without its end, as a crash leaves
    it, is cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = 0
        self._seq = 0
        self._link = "0" * 32

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def poll(self) -> list[Event]:
        """Events that were written since the last look, by anybody else."""
        with self._locked():
            return self._read()

    def append(self, kind: str, data: Mapping[str, Any], at: float) -> list[Event]:
        """Write an event and wait until it is on the disk. Returns what others wrote before it, and it."""
        with self._locked():
            found = self._read()
            event = Event(self._seq + 1, at, kind, data)
            line = _line(event, self._link)
            os.write(self._file, line)
            os.fsync(self._file)
            self._accept(event, line)
            return [*found, event]

    # -- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> list[Event]:
        raw = os.pread(self._file, os.fstat(self._file).st_size - self._size, self._size)
        whole, end, rest = raw.rpartition(b"\n")
        if rest:  # a crash in the middle of a line: it never happened
            os.ftruncate(self._file, self._size + len(whole) + len(end))
        events = []
        for line in (whole + end).splitlines(keepends=True):
            event = self._parsed(line)
            self._accept(event, line)
            events.append(event)
        return events

    def _parsed(self, line: bytes) -> Event:
        try:
            raw = json.loads(line)
            event = Event(raw["seq"], raw["at"], raw["kind"], raw["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: line {self._seq + 1} is not of a journal; restore the file") from error
        if event.seq != self._seq + 1 or _line(event, self._link) != line:
            raise ValueError(f"{self.path}: line {self._seq + 1} does not follow the line before it; restore the file")
        return event

    def _accept(self, event: Event, line: bytes) -> None:
        self._seq, self._size = event.seq, self._size + len(line)
        self._link = json.loads(line)["link"]


class MemoryJournal:
    """A journal that is forgotten: for simulations."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def poll(self) -> list[Event]:
        """Nobody else writes."""
        return []

    def append(self, kind: str, data: Mapping[str, Any], at: float) -> list[Event]:
        """Keep an event."""
        self.events.append(Event(len(self.events) + 1, at, kind, data))
        return self.events[-1:]


def _line(event: Event, link: str) -> bytes:
    body = {"seq": event.seq, "at": event.at, "kind": event.kind, "data": dict(event.data)}
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    made = hashlib.blake2b(f"{link} {text}".encode(), digest_size=16).hexdigest()
    return (json.dumps({**body, "link": made}, sort_keys=True, ensure_ascii=False) + "\n").encode()
