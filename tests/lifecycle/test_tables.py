"""Tables against an oracle that stores, for every sequence and head, the set of live positions and their data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvgate.lifecycle.pool import DuplicateIds, OutOfPages, PageError, PagePool, State, WrongState
from kvgate.lifecycle.tables import Appended, Geometry, Moved, Tables
from kvgate.lifecycle.words import lowest_dead, pack, unpack

LAYERS, HEADS, SIZE = 2, 2, 8


class TablesMachine(RuleBasedStateMachine):
    """Data is a number per slot; copies are executed as the plans say; every live slot must show its token's number."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(160)
        self.tables = Tables(self.pool, Geometry(LAYERS, HEADS, SIZE), sequences=1, pages=1)
        self.data = np.full(160 * SIZE, -1, np.int64)
        self.oracle: dict[int, dict[tuple[int, int], dict[int, int]]] = {}
        self.next: dict[int, int] = {}
        self.serial = 0

    def _copy(self, placed: Appended | Moved) -> None:
        source, target = placed.copy_from.astype(np.int64), placed.copy_to.astype(np.int64)
        if isinstance(placed, Appended):
            source, target = ((ids[:, None] * SIZE + np.arange(SIZE)).ravel() for ids in (source, target))
        self.data[target] = self.data[source].copy()

    @initialize(target=sequences)
    def create_the_first(self) -> int:
        """Lists of sequences cannot be drawn while there is none."""
        return self._create()

    @rule(target=sequences)
    def create(self) -> int:
        return self._create()

    def _create(self) -> int:
        sequence = self.tables.create()
        self.oracle[sequence] = {(layer, head): {} for layer in range(LAYERS) for head in range(HEADS)}
        self.next[sequence] = 0
        return sequence

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> object:
        if parent not in self.oracle:
            return multiple()
        child = self.tables.fork(parent)
        self.oracle[child] = {key: dict(tokens) for key, tokens in self.oracle[parent].items()}
        self.next[child] = self.next[parent]
        return child

    @rule(
        chosen=st.lists(sequences, min_size=1, max_size=3),
        counts=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    )
    def append(self, chosen: list[int], counts: list[int]) -> None:
        chosen = [sequence for sequence in dict.fromkeys(chosen) if sequence in self.oracle]
        self._append(chosen, counts[: len(chosen)])

    @rule(chosen=st.lists(sequences, min_size=1, max_size=4))
    def append_one_each(self, chosen: list[int]) -> None:
        chosen = [sequence for sequence in dict.fromkeys(chosen) if sequence in self.oracle]
        self._append(chosen, [1] * len(chosen))

    def _append(self, chosen: list[int], counts: list[int]) -> None:
        if not chosen:
            return
        before = self.pool.ref.copy(), self.tables.live.copy(), self.tables.counts.copy()
        try:
            placed = self.tables.append(chosen, counts, [self.next[s] for s in chosen])
        except OutOfPages:
            assert np.array_equal(before[0], self.pool.ref)
            assert np.array_equal(before[1], self.tables.live)
            assert np.array_equal(before[2], self.tables.counts)
            return
        self._copy(placed)
        at = 0
        for sequence, count in zip(chosen, counts, strict=True):
            for _ in range(count):
                for (layer, head), tokens in self.oracle[sequence].items():
                    self.serial += 1
                    self.data[placed.slots[at, layer, head]] = self.serial
                    tokens[self.next[sequence]] = self.serial
                self.next[sequence] += 1
                at += 1

    @rule(sequence=sequences, seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    def retain(self, sequence: int, seed: int, share: float) -> None:
        if sequence not in self.oracle:
            return
        slots = self.tables.live_slots(sequence)
        keep = slots & (np.random.default_rng(seed).random(slots.shape) < share)
        before = self._mapped(sequence)
        shown = self._shown(sequence, keep)
        moved = self.tables.retain(sequence, keep)
        if moved is not None:
            self._check_source(sequence, before, moved)
        for key, tokens in self.oracle[sequence].items():
            self.oracle[sequence][key] = {p: tokens[p] for p in shown[key]}
        for (layer, head), count in np.ndenumerate(self.tables.counts[sequence]):
            held = self.tables.live[sequence, layer, head, :count]
            assert (held != 0).all(), "a page without a live slot is still held"

    @rule(sequence=sequences)
    def compact(self, sequence: int) -> None:
        if sequence not in self.oracle:
            return
        before = self._mapped(sequence)
        try:
            moved = self.tables.compact(sequence)
        except OutOfPages:
            return
        if moved is not None:
            self._copy(moved)
            self._check_source(sequence, before, moved)
        live = self.tables.live_counts(sequence)
        assert np.array_equal(self.tables.counts[sequence], -(-live // SIZE)), "compaction left more pages than needed"

    @rule(sequence=sequences)
    def release(self, sequence: int) -> None:
        if sequence not in self.oracle:
            return
        self.tables.release(sequence)
        del self.oracle[sequence]
        with pytest.raises(PageError):
            self.tables.release(sequence)

    def _mapped(self, sequence: int) -> np.ndarray:
        slots = self.tables.live_slots(sequence)
        pages = np.repeat(self.tables.pages[sequence, :, :, : slots.shape[-1] // SIZE], SIZE, -1)
        return self.data[pages * SIZE + np.tile(np.arange(SIZE), slots.shape[-1] // SIZE)]

    def _check_source(self, sequence: int, before: np.ndarray, moved: Moved) -> None:
        live = self.tables.live_slots(sequence)
        assert moved.source.shape == live.shape
        assert moved.source.max(initial=0) < before.shape[-1], "a slot that is not live points outside the old table"
        assert np.array_equal(np.take_along_axis(before, moved.source, -1)[live], self._mapped(sequence)[live])

    def _shown(self, sequence: int, keep: np.ndarray) -> dict[tuple[int, int], set[int]]:
        positions = self.tables.positions[self.tables.pages[sequence, :, :, : keep.shape[-1] // SIZE]].reshape(
            keep.shape
        )
        return {key: set(positions[key][keep[key]].tolist()) for key in np.ndindex(LAYERS, HEADS)}

    @invariant()
    def live_slots_show_their_tokens(self) -> None:
        self.tables.check()
        for sequence, heads in self.oracle.items():
            live = self.tables.live_slots(sequence)
            data = self._mapped(sequence)
            shown = self._shown(sequence, live)
            for key, tokens in heads.items():
                assert shown[key] == set(tokens)
                assert sorted(data[key][live[key]].tolist()) == sorted(tokens.values())


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_words_pack_and_unpack(size: int) -> None:
    slots = np.random.default_rng(size).random((2, 3, 5 * size)) < 0.5
    assert np.array_equal(unpack(pack(slots, size), size), slots)
    words = pack(slots, size)
    assert np.array_equal(lowest_dead(words, size), slots.reshape(2, 3, 5, size).argmin(-1))


def test_pool_refuses_and_changes_nothing() -> None:
    pool = PagePool(8)
    ids = pool.alloc(3)
    for bad, error in [
        (np.array([ids[0], ids[0]], np.int32), DuplicateIds),
        (np.array([ids[0], 7], np.int32), WrongState),
        (np.array([ids[0], 8], np.int32), PageError),
        (np.array([ids[0], -1], np.int32), PageError),
    ]:
        for call in (pool.decref, pool.incref):
            with pytest.raises(error):
                call(bad)
            assert pool.ref.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    with pytest.raises(OutOfPages):
        pool.alloc(6)
    assert pool.free == 5
    pool.decref(ids)
    with pytest.raises(WrongState):
        pool.decref(ids)
    pool.check()


def test_pool_states_sum_and_move() -> None:
    pool = PagePool(6)
    ids = pool.alloc(4)
    assert pool.decref(ids[:2], State.FENCED).tolist() == ids[:2].tolist()
    pool.decref(ids[2:3], State.CACHED)
    pool.quarantine(ids[3:])
    assert sum(pool.counts().values()) == 6
    pool.move(ids[:2], State.FENCED, State.FREE)
    pool.move(ids[2:3], State.CACHED, State.REFERENCED)
    with pytest.raises(WrongState):
        pool.move(ids[:1], State.FENCED, State.FREE)
    pool.check()
    assert pool.counts() == {State.FREE: 4, State.CACHED: 0, State.REFERENCED: 1, State.FENCED: 0, State.QUARANTINED: 1}
