"""The append-only journal of the swap area: which payload files are committed.

A record is ``magic, length, CRC-32 of the body, body``; the body is JSON. Reading stops at nothing: a record cut short
at the end (a crash while appending) is dropped, a damaged one in the middle is skipped up to the next valid one.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

_MAGIC = b"KVJ1"
_HEAD = struct.Struct("<4sII")
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Put:
    """A payload is committed: ``number`` names its file, ``digest`` is BLAKE2b-128 of its ``size`` bytes, in hex."""

    key: str
    number: int
    size: int
    digest: str


@dataclass(frozen=True)
class Tombstone:
    """Everything of ``key`` up to file ``number`` is gone."""

    key: str
    number: int


Record = Put | Tombstone


def encode(record: Record) -> bytes:
    """One framed record."""
    kind = "put" if isinstance(record, Put) else "del"
    body = json.dumps({"kind": kind, **asdict(record)}, sort_keys=True).encode()
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def _parse(body: bytes) -> Record | None:
    try:
        raw: dict[str, Any] = json.loads(body)
        kind = raw.pop("kind")
        return Put(**raw) if kind == "put" else Tombstone(**raw)
    except (ValueError, KeyError, TypeError):
        return None


def decode(data: bytes) -> tuple[list[Record], int]:
    """All valid records of a journal, in order, and the number of damaged places."""
    records: list[Record] = []
    damaged = at = 0
    while at < len(data):
        record, end = _at(data, at)
        if record is not None:
            records.append(record)
            at = end
            continue
        damaged += 1
        at = data.find(_MAGIC, at + 1)
        if at < 0:
            break
    return records, damaged


def _at(data: bytes, at: int) -> tuple[Record | None, int]:
    if at + _HEAD.size > len(data):
        return None, at
    magic, length, crc = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    body = data[start : start + length]
    if magic != _MAGIC or length > _LONGEST or len(body) < length or zlib.crc32(body) != crc:
        return None, at
    return _parse(body), start + length
