"""Per-sequence page tables and live words, over one pool.

Axis legend: R sequences, L layers, H kv heads, P logical pages, S slots of a page, T new tokens.

A table entry ``[sequence, layer, head, p]`` with ``p < counts`` holds one reference to its page, and its live word says
which slots *this* sequence attends. Slots that are not live, never written or evicted, are where the next tokens go, if
nobody else references the page. Which token a slot holds stands in ``positions``, so slot order means nothing.

Every method either does all of its work or raises and changes nothing. Those that need data moved return what to copy;
the caller copies before it launches anything that reads the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.pool import PageError, PageIds, PagePool, State
from kvgate.lifecycle.words import PAGE_SIZES, Words, full_word, lowest_dead, pack, unpack

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """Shape of the cache: every sequence has ``layers * kv_heads`` page lists."""

    layers: int
    kv_heads: int
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size {self.page_size}: choose one of {', '.join(map(str, PAGE_SIZES))}")

    @property
    def heads(self) -> int:
        """Page lists of one sequence."""
        return self.layers * self.kv_heads

    def pages_for(self, tokens: int) -> int:
        """Pages a sequence of ``tokens`` live tokens needs over all layers and heads."""
        return self.heads * -(-tokens // self.page_size)


@dataclass(frozen=True)
class Appended:
    """Where new tokens go.

    Attributes:
        slots: int64 ``[T, L, H]``, flat slot (page * S + slot) of each token, sequence by sequence.
        copy_from, copy_to: int32 page ids; shared pages that must be copied before anything is written.
    """

    slots: Int64
    copy_from: PageIds
    copy_to: PageIds


@dataclass(frozen=True)
class Moved:
    """A sequence's slots after pages were dropped or compacted.

    Attributes:
        source: int64 ``[L, H, P * S]``, for each slot of the new table the slot of the old table it came from. Only
            live slots count.
        copy_from, copy_to: int64 flat slots to copy.
    """

    source: Int64
    copy_from: Int64
    copy_to: Int64


@dataclass(frozen=True)
class _Room:
    """How a sequence makes room: ``usable`` and ``copied`` bool ``[L, H, P]``, ``added`` int64 ``[L, H]``."""

    usable: NDArray[np.bool_]
    copied: NDArray[np.bool_]
    added: Int64

    @property
    def pages(self) -> int:
        return int(self.copied.sum() + self.added.sum())


_NO_SLOTS = np.zeros(0, np.int64)


class Tables:
    """All sequences' tables, stacked so that a batch is one gather.

    Attributes:
        pages: int32 ``[R, L, H, P]``; entries at or beyond ``counts`` mean nothing.
        live: uint32 ``[R, L, H, P]``; zero at or beyond ``counts``.
        counts: int32 ``[R, L, H]``, pages held.
        positions: int32 ``[pages of the pool, S]``, token index of each slot.
    """

    def __init__(self, pool: PagePool, geometry: Geometry, *, sequences: int = 16, pages: int = 64) -> None:
        self.pool = pool
        self.geometry = geometry
        shape = (sequences, geometry.layers, geometry.kv_heads)
        self.pages = np.zeros((*shape, pages), np.int32)
        self.live = np.zeros((*shape, pages), np.uint32)
        self.counts = np.zeros(shape, np.int32)
        self.active = np.zeros(sequences, np.bool_)
        self.positions = np.zeros((pool.total, geometry.page_size), np.int32)

    def create(self) -> int:
        """An empty sequence's id. Ids of released sequences are used again."""
        if self.active.all():
            self._grow(sequences=2 * len(self.active))
        sequence = int(np.argmin(self.active))
        self.active[sequence] = True
        self.live[sequence] = 0
        self.counts[sequence] = 0
        return sequence

    def fork(self, parent: int) -> int:
        """A sequence that shares all pages of ``parent`` and has its own copy of the live words."""
        self._require_active(parent)
        self.pool.incref(self.held(parent))
        child = self.create()
        self.pages[child] = self.pages[parent]
        self.live[child] = self.live[parent]
        self.counts[child] = self.counts[parent]
        return child

    def release(self, sequence: int, into: State = State.FREE) -> PageIds:
        """Drop the sequence; returns the pages nobody references any more, which went ``into`` that state."""
        self._require_active(sequence)
        released = self.pool.decref(self.held(sequence), into)
        self.active[sequence] = False
        self.live[sequence] = 0
        self.counts[sequence] = 0
        return released

    def adopt(self, pages: PageIds, live: Words, counts: Int32 | None = None) -> int:
        """A sequence over pages the caller already holds one reference to each of (a prefix hit, a swap-in).

        ``pages`` int32 ``[L, H, P]`` and ``live`` uint32 ``[L, H, P]``; every page has at least one live slot.
        ``counts`` int32 ``[L, H]`` says how many of the ``P`` each list has; without it, all.
        """
        sequence = self.create()
        width = pages.shape[-1]
        self._grow(pages=width)
        self.pages[sequence, :, :, :width] = pages
        self.live[sequence, :, :, :width] = live
        self.counts[sequence] = width if counts is None else counts
        self.live[sequence][~self._held_mask(sequence)] = 0
        return sequence

    def held(self, sequence: int) -> PageIds:
        """Ids of all pages the sequence holds, each once."""
        held: PageIds = self.pages[sequence][self._held_mask(sequence)]
        return held

    def live_counts(self, sequence: int) -> Int64:
        """int64 ``[L, H]``, live tokens."""
        counts: Int64 = np.bitwise_count(self.live[sequence]).sum(-1, dtype=np.int64)
        return counts

    def live_slots(self, sequence: int) -> NDArray[np.bool_]:
        """bool ``[L, H, P * S]`` over the widest head's pages."""
        return unpack(self.live[sequence, :, :, : self.width([sequence])], self.geometry.page_size)

    def width(self, sequences: Sequence[int]) -> int:
        """Pages of the longest page list among ``sequences``, at least 1."""
        return max(1, int(self.counts[list(sequences)].max(initial=0)))

    def append(self, sequences: Sequence[int], tokens: Sequence[int], first: Sequence[int]) -> Appended:
        """Slots for ``tokens[i]`` new tokens of each sequence, at positions from ``first[i]`` on; they become live.

        Dead slots of pages the sequence alone holds are used first, then dead slots of shared pages (copied on write),
        then new pages. Raises OutOfPages with nothing changed.
        """
        if len(set(sequences)) != len(sequences):
            raise PageError("append names a sequence twice")
        for sequence in sequences:
            self._require_active(sequence)
        if all(count == 1 for count in tokens):
            placed = self._append_one(np.asarray(sequences))
        else:
            placed = self._append_many(sequences, tokens)
        where = np.concatenate([np.arange(n) + start for n, start in zip(tokens, first, strict=True)])
        self.positions.reshape(-1)[placed.slots] = where[:, None, None]
        return placed

    def retain(self, sequence: int, keep: NDArray[np.bool_], into: State = State.FREE) -> Moved | None:
        """Keep only the slots ``keep`` bool ``[L, H, P * S]`` (a subset of :meth:`live_slots`); pages without any are
        dropped and the rest close ranks. Returns how slots moved, None if none did.
        """
        self._require_active(sequence)
        words = pack(keep, self.geometry.page_size)
        width = words.shape[-1]
        live = self.live[sequence, :, :, :width]
        if (words & ~live).any() or self.live[sequence, :, :, width:].any():
            raise PageError("retain would revive a dead slot")
        dropped = self._held_mask(sequence)[:, :, :width] & (words == 0)
        if not dropped.any():
            live[:] = words
            return None
        self.pool.decref(self.pages[sequence, :, :, :width][dropped], into)
        order = np.argsort(dropped, axis=-1, stable=True)
        self.pages[sequence, :, :, :width] = np.take_along_axis(self.pages[sequence, :, :, :width], order, -1)
        live[:] = np.take_along_axis(words, order, -1)
        self.counts[sequence] -= dropped.sum(-1, dtype=np.int32)
        return Moved(
            self._slots_of(order)[:, :, : self.width([sequence]) * self.geometry.page_size], _NO_SLOTS, _NO_SLOTS
        )

    def compact(self, sequence: int, into: State = State.FREE) -> Moved | None:
        """Gather the live slots of partly live pages into new pages, wherever that saves a page.

        Full pages stay, shared or not. Out of place: the sources are released only after the copies were planned, and
        their content is untouched until somebody is given them. Returns None if nothing was worth moving.
        """
        self._require_active(sequence)
        size = self.geometry.page_size
        width = self.width([sequence])
        live = self.live[sequence, :, :, :width]
        partial = (live != full_word(size)) & self._held_mask(sequence)[:, :, :width]
        loose = np.where(partial, np.bitwise_count(live), 0).sum(-1, dtype=np.int64)
        fresh_pages = -(-loose // size)
        worth = fresh_pages < partial.sum(-1)
        if not worth.any():
            return None
        partial &= worth[..., None]
        fresh_pages = np.where(worth, fresh_pages, 0)
        fresh = self.pool.alloc(int(fresh_pages.sum()))
        moved = self._plan_compaction(sequence, partial, np.where(worth, loose, 0), fresh_pages, fresh)
        return self._finish_compaction(sequence, partial, fresh_pages, fresh, moved, into)

    def references(self) -> Int64:
        """int64 ``[pages of the pool]``, references the active sequences hold."""
        held = [self.held(int(sequence)) for sequence in np.flatnonzero(self.active)]
        return np.bincount(np.concatenate([np.zeros(0, np.int32), *held]), minlength=self.pool.total)

    def check(self, elsewhere: Int64 | None = None) -> None:
        """Raise AssertionError unless the pool's counts are exactly the references held here and ``elsewhere``."""
        self.pool.check()
        found = self.references() + (0 if elsewhere is None else elsewhere)
        wrong = np.flatnonzero(found != self.pool.ref)
        assert len(wrong) == 0, f"page {wrong[0]}: {found[wrong[0]]} references held, {self.pool.ref[wrong[0]]} counted"
        beyond = np.arange(self.pages.shape[-1]) >= self.counts[..., None]
        assert not self.live[beyond].any(), "a live slot beyond the page count"
        assert not self.live[~self.active].any(), "a released sequence has live slots"

    # -- append ---------------------------------------------------------------------------------------------------

    def _append_one(self, rows: NDArray[np.intp]) -> Appended:
        width = self.width(rows.tolist())
        live = self.live[rows, :, :, :width]
        pages = self.pages[rows, :, :, :width]
        room = (live != full_word(self.geometry.page_size)) & (np.arange(width) < self.counts[rows][..., None])
        own = room & (self.pool.ref[pages] == 1)
        any_own, any_room = own.any(-1), room.any(-1)
        target = np.where(any_own, own.argmax(-1), np.where(any_room, room.argmax(-1), self.counts[rows]))
        copied = any_room & ~any_own
        added = ~any_room
        fresh = self.pool.alloc(int((copied | added).sum()))
        self._grow(pages=int(target.max()) + 1)
        r, layer, head = np.broadcast_arrays(rows[:, None, None], *np.ogrid[: live.shape[1], : live.shape[2]])
        old = self.pages[r[copied], layer[copied], head[copied], target[copied]]
        needs = copied | added
        self.pages[r[needs], layer[needs], head[needs], target[needs]] = fresh
        new = fresh[copied[needs]]
        self._copy_on_write(old, new)
        self.counts[r[added], layer[added], head[added]] += 1
        words = self.live[r, layer, head, target]
        slot = lowest_dead(words, self.geometry.page_size)
        self.live[r, layer, head, target] = words | (np.uint32(1) << slot.astype(np.uint32))
        return Appended(self.pages[r, layer, head, target].astype(np.int64) * self.geometry.page_size + slot, old, new)

    def _append_many(self, sequences: Sequence[int], tokens: Sequence[int]) -> Appended:
        wanted = [self._room(sequence, count) for sequence, count in zip(sequences, tokens, strict=True)]
        fresh = self.pool.alloc(sum(room.pages for room in wanted))
        self._grow(
            pages=max(int((self.counts[s] + room.added).max()) for s, room in zip(sequences, wanted, strict=True))
        )
        placed, at = [], 0
        for sequence, count, room in zip(sequences, tokens, wanted, strict=True):
            placed.append(self._place(sequence, count, room, fresh[at : at + room.pages]))
            at += room.pages
        return Appended(*(np.concatenate(parts) for parts in zip(*placed, strict=True)))

    def _room(self, sequence: int, count: int) -> _Room:
        held = self._held_mask(sequence)
        dead = np.where(held, self.geometry.page_size - np.bitwise_count(self.live[sequence]).astype(np.int64), 0)
        own = held & (self.pool.ref[self.pages[sequence]] == 1)
        missing = np.maximum(count - np.where(own, dead, 0).sum(-1), 0)
        offered = np.where(own, 0, dead)
        copied = (offered > 0) & (np.cumsum(offered, -1) - offered < missing[..., None])
        missing = np.maximum(missing - np.where(copied, offered, 0).sum(-1), 0)
        return _Room(own | copied, copied, -(-missing // self.geometry.page_size))

    def _place(self, sequence: int, count: int, room: _Room, fresh: PageIds) -> tuple[Int64, PageIds, PageIds]:
        size = self.geometry.page_size
        pages, live, counts = self.pages[sequence], self.live[sequence], self.counts[sequence]
        copied = np.zeros(pages.shape, np.bool_)
        copied[..., : room.copied.shape[-1]] = room.copied
        old = pages[copied]
        new, rest = fresh[: len(old)], fresh[len(old) :]
        pages[copied] = new
        self._copy_on_write(old, new)
        index = np.arange(pages.shape[-1])
        usable = (index >= counts[..., None]) & (index < (counts + room.added)[..., None])
        pages[usable] = rest
        usable[..., : room.usable.shape[-1]] |= room.usable
        counts += room.added.astype(np.int32)
        width = self.width([sequence])
        dead = ~unpack(live[:, :, :width], size) & np.repeat(usable[:, :, :width], size, -1)
        chosen = dead & (np.cumsum(dead, -1, dtype=np.int32) <= count)
        live[:, :, :width] |= pack(chosen, size)
        slots = self._flat_slots(sequence, width)[chosen].reshape(*counts.shape, count)
        return np.moveaxis(slots, -1, 0), old, new

    def _copy_on_write(self, old: PageIds, new: PageIds) -> None:
        """Give up one reference to each old page. Several sequences of one call may leave the same page: the last one
        frees it, after the caller's copy at the latest, since nothing is allocated before that.
        """
        self.positions[new] = self.positions[old]
        self.pool.drop_references(old)

    # -- compaction -----------------------------------------------------------------------------------------------

    def _plan_compaction(
        self, sequence: int, partial: NDArray[np.bool_], loose: Int64, fresh_pages: Int64, fresh: PageIds
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Int64, Int64]:
        size = self.geometry.page_size
        width = partial.shape[-1]
        leaving = unpack(self.live[sequence, :, :, :width] * partial, size)
        source = self._flat_slots(sequence, width)[leaving]
        most = int(fresh_pages.max())
        arriving = np.arange(most * size) < loose[..., None]
        where = np.zeros((*fresh_pages.shape, most), np.int64)
        where[np.arange(most) < fresh_pages[..., None]] = fresh
        target = (where[..., None] * size + np.arange(size)).reshape(arriving.shape)[arriving]
        flat_positions = self.positions.reshape(-1)
        flat_positions[target] = flat_positions[source]
        return leaving, arriving, source, target

    def _finish_compaction(
        self,
        sequence: int,
        partial: NDArray[np.bool_],
        fresh_pages: Int64,
        fresh: PageIds,
        moved: tuple[NDArray[np.bool_], NDArray[np.bool_], Int64, Int64],
        into: State,
    ) -> Moved:
        size = self.geometry.page_size
        leaving, arriving, copy_from, copy_to = moved
        width, most = partial.shape[-1], int(fresh_pages.max())
        held = self._held_mask(sequence)[:, :, :width]
        old_pages = self.pages[sequence, :, :, :width]
        self.pool.decref(old_pages[partial], into)
        joined = np.zeros((*fresh_pages.shape, width + most), np.int32)
        joined[..., :width] = old_pages
        joined[..., width:][np.arange(most) < fresh_pages[..., None]] = fresh
        words = np.concatenate([np.where(partial, 0, self.live[sequence, :, :, :width]), pack(arriving, size)], -1)
        gone = np.concatenate([~held | partial, np.arange(most) >= fresh_pages[..., None]], -1)
        source = np.broadcast_to(np.arange((width + most) * size), (*fresh_pages.shape, (width + most) * size)).copy()
        source[..., width * size :] = 0
        source[..., width * size :][arriving] = np.broadcast_to(np.arange(width * size), leaving.shape)[leaving]
        order = np.argsort(gone, axis=-1, stable=True)
        counts = (~gone).sum(-1)
        keep = int(counts.max())
        self.pages[sequence, :, :, :keep] = np.take_along_axis(joined, order, -1)[..., :keep]
        self.live[sequence] = 0
        self.live[sequence, :, :, :keep] = np.take_along_axis(words, order, -1)[..., :keep]
        self.counts[sequence] = counts
        slots = self._slots_of(order)[:, :, : max(1, keep) * size]
        return Moved(np.take_along_axis(source, slots, -1), copy_from, copy_to)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _held_mask(self, sequence: int) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = np.arange(self.pages.shape[-1]) < self.counts[sequence][..., None]
        return mask

    def _flat_slots(self, sequence: int, width: int) -> Int64:
        """int64 ``[L, H, width * S]``, flat slot of each slot of the table."""
        size = self.geometry.page_size
        pages = self.pages[sequence, :, :, :width, None].astype(np.int64)
        flat: Int64 = (pages * size + np.arange(size)).reshape(*pages.shape[:2], -1)
        return flat

    def _slots_of(self, order: NDArray[np.intp]) -> Int64:
        """Slot indices ``[L, H, P * S]`` from page indices ``[L, H, P]``."""
        size = self.geometry.page_size
        return (order[..., None] * size + np.arange(size)).reshape(*order.shape[:-1], -1)

    def _require_active(self, sequence: int) -> None:
        if not (0 <= sequence < len(self.active) and self.active[sequence]):
            raise PageError(f"sequence {sequence} does not exist (released twice?)")

    def _grow(self, *, sequences: int = 0, pages: int = 0) -> None:
        rows = max(sequences, len(self.active))
        width = self.pages.shape[-1]
        if pages > width:
            width = max(pages, 2 * width)
        if rows == len(self.active) and width == self.pages.shape[-1]:
            return
        extra = ((0, rows - len(self.active)), (0, 0), (0, 0))
        more = (0, width - self.pages.shape[-1])
        self.pages = np.pad(self.pages, (*extra, more))
        self.live = np.pad(self.live, (*extra, more))
        self.counts = np.pad(self.counts, extra)
        self.active = np.pad(self.active, extra[0])
