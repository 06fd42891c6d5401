"""A sequence's pages as bytes: out to the host area, back into other pages, slot for slot."""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvgate.engine.engine import Engine
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.pool import PageIds

_HEAD = struct.Struct("<4sQII")
_MAGIC = b"KVG1"
_Kind = TypeVar("_Kind", bound=np.generic)


def pack(engine: Engine, sequence: int, length: int) -> bytes:
    """Everything that ``sequence`` holds: page counts, live words, positions, keys, values.

    Slots that are not live travel as they are, so the copy is exact page by page.
    """
    tables = engine.tables
    held = tables.held(sequence)
    width = tables.width([sequence])
    parts = [
        tables.counts[sequence].astype(np.int32),
        tables.live[sequence, :, :, :width].astype(np.uint32),
        tables.positions[held],
        _raw(engine.store.k, held),
        _raw(engine.store.v, held),
    ]
    return _HEAD.pack(_MAGIC, length, width, len(held)) + b"".join(np.ascontiguousarray(p).tobytes() for p in parts)


def pages_in(payload: bytes) -> int:
    """Pages a payload needs."""
    return int(_HEAD.unpack_from(payload)[3])


def unpack(engine: Engine, ledger: Ledger, payload: bytes, account: int) -> tuple[int, int]:
    """Put a payload into freshly allocated pages; returns the tables' new sequence id and its length in tokens.

    Raises OutOfPages with nothing changed. The payload has passed its checksum: a wrong shape is a bug.
    """
    magic, length, width, count = _HEAD.unpack_from(payload)
    assert magic == _MAGIC, "not a swapped sequence"
    tables = engine.tables
    layers, heads, size = tables.geometry.layers, tables.geometry.kv_heads, tables.geometry.page_size
    reader = _Reader(payload, _HEAD.size)
    counts = reader.take(np.int32, layers * heads).reshape(layers, heads)
    live = reader.take(np.uint32, layers * heads * width).reshape(layers, heads, width)
    positions = reader.take(np.int32, count * size).reshape(count, size)
    fresh = ledger.alloc(count, account)
    try:
        _fill(engine, reader, fresh, positions)
    except BaseException:
        ledger.release(fresh)
        raise
    assert reader.at == len(payload), "a swapped sequence has bytes left over"
    pages = np.zeros((layers, heads, width), np.int32)
    pages[np.arange(width) < counts[..., None]] = fresh
    return tables.adopt(pages, live, counts), int(length)


def _fill(engine: Engine, reader: _Reader, fresh: PageIds, positions: NDArray[np.int32]) -> None:
    tables, store = engine.tables, engine.store
    tables.positions[fresh] = positions
    at = torch.from_numpy(fresh.astype(np.int64)).to(store.device)
    store.positions[at] = torch.from_numpy(positions.copy()).to(store.device)
    for pool in (store.k, store.v):
        pool[at] = _tensor(reader.take(np.uint8, len(fresh) * pool[0].numel() * pool.element_size()), pool, len(fresh))


class _Reader:
    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = payload
        self.at = at

    def take(self, kind: type[_Kind], count: int) -> NDArray[_Kind]:
        found = np.frombuffer(self._payload, kind, count, self.at)
        self.at += found.nbytes
        return found


def _raw(pool: Tensor, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
    at = torch.from_numpy(pages.astype(np.int64)).to(pool.device)
    raw: NDArray[np.uint8] = pool[at].contiguous().view(torch.uint8).cpu().numpy()
    return raw


def _tensor(raw: NDArray[np.uint8], pool: Tensor, count: int) -> Tensor:
    flat = torch.from_numpy(raw.copy()).view(pool.dtype)
    return flat.reshape(count, *pool.shape[1:]).to(pool.device)
