"""The slots of a row: dropped, moved and counted, with the row's attention mass following."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvgate.engine.mass import clear_mass, fit_mass, move_mass
from kvgate.engine.models import ModelInfo
from kvgate.engine.sequence import Sequence
from kvgate.engine.store import PageStore
from kvgate.lifecycle.tables import Moved, Tables


class Slots:
    """Changes of a row's tables with the copies and the mass that go with them."""

    def __init__(self, tables: Tables, store: PageStore, info: ModelInfo) -> None:
        self._tables = tables
        self.store = store
        self._info = info

    def follow(self, row: Sequence, moved: Moved | None) -> None:
        """Do a plan's copies and let the row's mass move with its slots."""
        if moved is None:
            return
        self.store.carry_out(moved)
        move_mass(row, moved.source, self._tables.live_slots(row.id))

    def drop_native(self, row: Sequence) -> None:
        """Lossless: slots behind a layer's declared window will never be attended again."""
        windows = self._info.native_windows
        if not any(window and row.length >= window for window in windows):
            return
        live = self._tables.live_slots(row.id)
        pages = self._tables.pages[row.id, :, :, : live.shape[-1] // self._tables.geometry.page_size]
        positions = self._tables.positions[pages].reshape(live.shape)
        reach = np.array([row.length - window + 1 if window else 0 for window in windows])
        keep: NDArray[np.bool_] = live & (positions >= reach[:, None, None])
        if keep.sum() < live.sum():
            self.retain(row, keep)

    def take_back(self, rows: Several[Sequence], slots: NDArray[np.int64]) -> None:
        """Undo an append whose tokens never arrived: the flat ``slots`` it handed out die again."""
        for row in rows:
            live = self._tables.live_slots(row.id)
            fit_mass(row, live.shape[-1])
            self.retain(row, live & ~np.isin(self._flat(row, live), slots))

    def retain(self, row: Sequence, keep: NDArray[np.bool_]) -> None:
        """``keep`` ``[L, H, slots]``, a subset of the live slots; the row's mass follows."""
        moved = self._tables.retain(row.id, keep)
        clear_mass(row, keep)
        self.follow(row, moved)

    def table(self, row: Sequence) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """Page ids ``[L, H, P]``, and position and liveness ``[L, H, S]`` of the slots."""
        pages = self._tables.pages[row.id, :, :, : self._tables.width([row.id])]
        positions: NDArray[np.int32] = self._tables.positions[pages].reshape(*pages.shape[:2], -1)
        return pages, positions, self._tables.live_slots(row.id)

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self._tables.geometry.page_size

    def width(self, row: Sequence) -> int:
        """Slots of the row's longest head."""
        return self._tables.width([row.id]) * self._tables.geometry.page_size

    def even(self, row: Sequence) -> Tensor | None:
        """int64 ``[L, H, S]``, the row's live slots in the pool, if every head has as many and there are any."""
        live = self._tables.live_slots(row.id)
        counts = live.sum(-1)
        if counts.min() != counts.max() or counts.max() == 0:
            return None
        return torch.from_numpy(self._flat(row, live)[live].reshape(*counts.shape, -1))

    def exact(self, length: int) -> int:
        """Slots that the exact run holds after ``length`` tokens."""
        each = [length if window is None else min(length, window - 1) for window in self._info.native_windows]
        return sum(each) * self._info.kv_heads

    def _flat(self, row: Sequence, live: NDArray[np.bool_]) -> NDArray[np.int64]:
        """int64 of ``live``'s shape: where each slot of the table lies in the pool."""
        size = self._tables.geometry.page_size
        pages = self._tables.pages[row.id, :, :, : live.shape[-1] // size, None].astype(np.int64)
        flat: NDArray[np.int64] = (pages * size + np.arange(size)).reshape(live.shape)
        return flat
