"""The host swap area: payloads of preempted sequences, all or nothing, checked, and safe against a crash at any byte.

Order of a write: payload to a temporary file, rename to its number, then the journal record; only the record commits.
Order of a removal: the tombstone, then the file. File numbers are never used twice, so a key that is put again after
a removal has a newer number than its tombstone. Recovery keeps exactly the committed entries whose file is there in
full, and removes every other file. What an earlier process left there belongs to nobody now: its owner discards it by
name (:meth:`HostArea.discard`) before it serves. A disk that refuses to write or read costs the payload, never the
process: the call says so, and the owner computes again. A payload that fails its checksum is never handed out: it is
dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from kvgate.lifecycle.swap.disk import Disk
from kvgate.lifecycle.swap.journal import Put, Record, Tombstone, decode, encode

_JOURNAL = "journal"
_FRESH = "journal.new"


@dataclass
class AreaCounts:
    """Since the start: bytes in and out, corrupt payloads dropped, damaged journal places skipped, files
    removed, reservations refused for lack of room, operations that the disk failed."""

    bytes_in: int = 0
    bytes_out: int = 0
    corrupt: int = 0
    damaged: int = 0
    orphans: int = 0
    refused: int = 0
    failed: int = 0


def _digest(payload: bytes) -> str:
    return blake2b(payload, digest_size=16).hexdigest()


def _file(number: int) -> str:
    return f"{number:012d}.kv"


@dataclass
class HostArea:
    """Payloads by key within ``capacity`` bytes; open it with :meth:`open`."""

    disk: Disk
    capacity: int
    counts: AreaCounts = field(default_factory=AreaCounts)
    _entries: dict[str, Put] = field(default_factory=dict)
    _reserved: dict[str, int] = field(default_factory=dict)
    _next: int = 1
    _records: int = 0

    @classmethod
    def open(cls, disk: Disk, capacity: int) -> HostArea:
        """Recover whatever was committed. Raises ValueError if it exceeds ``capacity`` bytes."""
        if capacity < 0:
            raise ValueError(f"host area of {capacity} bytes: needs at least 0")
        area = cls(disk, capacity)
        area._recover()
        if area.used > capacity:
            raise ValueError(f"host area of {capacity} bytes: the journal already names {area.used}; enlarge it")
        return area

    @property
    def used(self) -> int:
        """Bytes committed and reserved."""
        return sum(e.size for e in self._entries.values()) + sum(self._reserved.values())

    @property
    def free(self) -> int:
        """Bytes neither committed nor reserved."""
        return self.capacity - self.used

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def names(self) -> list[str]:
        """Committed keys."""
        return sorted(self._entries)

    def reserve(self, key: str, size: int) -> bool:
        """Set ``size`` bytes aside for ``key``, all of them or none; nobody ever waits holding a part."""
        assert key not in self._reserved, f"{key} has a reservation already"
        assert key not in self._entries, f"{key} is in the area already"
        if size > self.free:
            self.counts.refused += 1
            return False
        self._reserved[key] = size
        return True

    def cancel(self, key: str) -> None:
        """Give a reservation back; nothing happens if there is none."""
        self._reserved.pop(key, None)

    def discard(self) -> tuple[str, ...]:
        """Remove every entry; returns their keys. For what a process that is gone had swapped out."""
        gone = tuple(self.names())
        for key in gone:
            self.drop(key)
        return gone

    def put(self, key: str, payload: bytes) -> bool:
        """Commit the payload of a reservation; False where the disk fails: then nothing of it is kept.

        Whatever is raised meanwhile, the reservation is gone.
        """
        assert len(payload) <= self._reserved.get(key, -1), f"{key}: more bytes than were reserved"
        number = self._next
        self._next += 1
        entry = Put(key, number, len(payload), _digest(payload))
        try:
            self.disk.write(f"{number:012d}.tmp", payload)
            self.disk.rename(f"{number:012d}.tmp", _file(number))
            self._append(entry)
        except OSError:
            self.counts.failed += 1
            self._remove(f"{number:012d}.tmp", _file(number))
            return False
        finally:
            del self._reserved[key]
        self._entries[key] = entry
        self.counts.bytes_in += len(payload)
        return True

    def get(self, key: str) -> bytes | None:
        """The payload, or None where there is none that can be trusted; a corrupt one is dropped and counted."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            payload = self.disk.read(_file(entry.number))
        except FileNotFoundError:
            payload = b""
        except OSError:
            self.counts.failed += 1
            self.drop(key)
            return None
        if len(payload) != entry.size or _digest(payload) != entry.digest:
            self.counts.corrupt += 1
            self.drop(key)
            return None
        self.counts.bytes_out += len(payload)
        return payload

    def drop(self, key: str) -> bool:
        """Remove an entry or reservation; returns whether there was an entry. It is gone whatever the disk does:
        without tombstone or file, the other of the two is enough to forget it after a crash."""
        self.cancel(key)
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        try:
            self._append(Tombstone(key, entry.number))
        except OSError:
            self.counts.failed += 1
        self._remove(_file(entry.number))
        self._compact()
        return True

    def _remove(self, *names: str) -> None:
        for name in names:
            try:
                self.disk.remove(name)
            except OSError:
                self.counts.failed += 1

    def _append(self, record: Record) -> None:
        self.disk.append(_JOURNAL, encode(record))
        self._records += 1

    def _compact(self) -> None:
        """Rewrite the journal once most of it is dead; the rename makes the switch."""
        if self._records < 64 + 4 * len(self._entries):
            return
        # A tombstone for the newest number keeps the numbers rising, even if every entry is gone.
        kept: list[Record] = [Tombstone("", self._next - 1), *self._entries.values()]
        try:
            self.disk.write(_FRESH, b"".join(map(encode, kept)))
            self.disk.rename(_FRESH, _JOURNAL)
        except OSError:
            self.counts.failed += 1  # the old journal is still whole
        self._records = len(kept)

    def _recover(self) -> None:
        names = self.disk.names()
        data = self.disk.read(_JOURNAL) if _JOURNAL in names else b""
        records, self.counts.damaged = decode(data)
        for record in records:
            self._next = max(self._next, record.number + 1)
            old = self._entries.get(record.key)
            if isinstance(record, Put):
                if old is None or old.number < record.number:
                    self._entries[record.key] = record
            elif old is not None and old.number <= record.number:
                del self._entries[record.key]
        self._drop_incomplete()
        self._remove_orphans(names)
        if data != b"".join(map(encode, records)):
            # Never append behind a torn record.
            self.disk.write(_FRESH, b"".join(map(encode, records)))
            self.disk.rename(_FRESH, _JOURNAL)
        self._records = len(records)

    def _drop_incomplete(self) -> None:
        for key, entry in list(self._entries.items()):
            try:
                complete = len(self.disk.read(_file(entry.number))) == entry.size
            except FileNotFoundError:
                complete = False
            if not complete:
                self.counts.corrupt += 1
                del self._entries[key]

    def _remove_orphans(self, names: list[str]) -> None:
        kept = {_file(e.number) for e in self._entries.values()} | {_JOURNAL}
        for name in names:
            stem = name.split(".")[0]
            if name.endswith((".kv", ".tmp")) and stem.isdigit():
                self._next = max(self._next, int(stem) + 1)
            if name not in kept:
                self.disk.remove(name)
                self.counts.orphans += 1
